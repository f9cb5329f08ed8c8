"""A seeded world of nodes in virtual time that checks the guarantees after every event."""
