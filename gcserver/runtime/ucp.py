"""The system's libucp (UCX), as much of it as a transport needs: contexts, workers, endpoints, active messages.

What may live here: declarations of libucp's types and calls, and Python objects that hold its handles. What may not:
who is connected to whom (`ucxtransport.py`), how an end of a connection lives and ends (`ucxends.py`).

The library is loaded when somebody asks for it and called through cffi without a compiler (ABI mode). Structures of UCX
begin with a mask of the fields that are set, so a newer library reads those that are declared here as they are meant.
An active message is a header and a payload. Small ones arrive whole (*eager*); of a large one the header arrives, and
the payload is fetched into memory of the receiver's choice (*rendezvous*): by RDMA, or in pieces over TCP.
"""

from __future__ import annotations

import functools
import os
import socket
import struct
from collections.abc import Callable
from typing import Any, ClassVar, Final, NamedTuple

import cffi

from gcserver.runtime import ucpthread, ucxdefaults
from gcserver.runtime.ucpthread import UcxThread

SONAME: Final = "libucp.so.0"
#: The oldest release this was tried with; active messages were another interface before.
OLDEST: Final = (1, 13)

_DECLARATIONS: Final = """
typedef int8_t ucs_status_t;
typedef struct {
    uint64_t field_mask; uint64_t features; size_t request_size; void *request_init; void *request_cleanup;
    uint64_t tag_sender_mask; int mt_workers_shared; size_t estimated_num_eps; size_t estimated_num_ppn;
    const char *name;
} ucp_params_t;
typedef struct {
    uint64_t field_mask; int thread_mode; unsigned long cpu_mask[128 / sizeof(long)]; unsigned events;
    void *user_data; int event_fd; uint64_t flags; const char *name; size_t am_alignment; uint64_t client_id;
} ucp_worker_params_t;
typedef struct { const void *addr; uint32_t addrlen; } ucs_sock_addr_t;
typedef void (*ucp_err_handler_cb_t)(void *arg, void *ep, ucs_status_t status);
typedef struct {
    uint64_t field_mask; const void *address; int err_mode; ucp_err_handler_cb_t err_cb; void *err_arg;
    void *user_data; unsigned flags; ucs_sock_addr_t sockaddr; void *conn_request; const char *name;
    ucs_sock_addr_t local_sockaddr;
} ucp_ep_params_t;
typedef struct {
    uint64_t field_mask; ucs_sock_addr_t sockaddr; void *accept_cb; void *accept_arg;
    void (*conn_cb)(void *request, void *arg); void *conn_arg;
} ucp_listener_params_t;
typedef struct { uint64_t field_mask; char sockaddr[128]; } ucp_listener_attr_t;
typedef struct {
    uint32_t op_attr_mask; uint32_t flags; void *request; void *cb; uint64_t datatype; void *user_data;
    void *reply_buffer; int memory_type; void *recv_info; void *memh;
} ucp_request_param_t;
typedef struct { uint64_t recv_attr; void *reply_ep; } ucp_am_recv_param_t;
typedef ucs_status_t (*ucp_am_recv_callback_t)(
    void *arg, const void *header, size_t header_length, void *data, size_t length, const ucp_am_recv_param_t *param);
typedef struct {
    uint64_t field_mask; unsigned id; uint32_t flags; ucp_am_recv_callback_t cb; void *arg;
} ucp_am_handler_param_t;

void ucp_get_version(unsigned *major, unsigned *minor, unsigned *release);
ucs_status_t ucp_config_read(const char *env_prefix, const char *filename, void **config_p);
ucs_status_t ucp_config_modify(void *config, const char *name, const char *value);
void ucp_config_release(void *config);
ucs_status_t ucp_init_version(
    unsigned major, unsigned minor, const ucp_params_t *params, const void *config, void **context_p);
void ucp_cleanup(void *context);
ucs_status_t ucp_worker_create(void *context, const ucp_worker_params_t *params, void **worker_p);
void ucp_worker_destroy(void *worker);
ucs_status_t ucp_worker_get_efd(void *worker, int *fd);
ucs_status_t ucp_worker_arm(void *worker);
unsigned ucp_worker_progress(void *worker);
ucs_status_t ucp_worker_set_am_recv_handler(void *worker, const ucp_am_handler_param_t *param);
ucs_status_t ucp_listener_create(void *worker, const ucp_listener_params_t *params, void **listener_p);
ucs_status_t ucp_listener_query(void *listener, ucp_listener_attr_t *attr);
ucs_status_t ucp_listener_reject(void *listener, void *request);
void ucp_listener_destroy(void *listener);
ucs_status_t ucp_ep_create(void *worker, const ucp_ep_params_t *params, void **ep_p);
intptr_t ucp_ep_close_nbx(void *ep, const ucp_request_param_t *param);
intptr_t ucp_ep_flush_nbx(void *ep, const ucp_request_param_t *param);
intptr_t ucp_am_send_nbx(
    void *ep, unsigned id, const void *header, size_t header_length, const void *buffer, size_t count,
    const ucp_request_param_t *param);
intptr_t ucp_am_recv_data_nbx(
    void *worker, void *data_desc, void *buffer, size_t count, const ucp_request_param_t *param);
ucs_status_t ucp_request_check_status(intptr_t request);
void ucp_request_free(intptr_t request);
const char *ucs_status_string(ucs_status_t status);
"""

# Bits of the masks, and constants, by the names of ucp.h.
_PARAM_FEATURES: Final = 1 << 0
_FEATURE_WAKEUP, _FEATURE_AM = 1 << 4, 1 << 6
_WORKER_FLAGS, _IGNORE_REQUEST_LEAK = 1 << 5, 1 << 0
_EP_ERR_MODE, _EP_ERR_HANDLER, _ERR_MODE_PEER = 1 << 1, 1 << 2, 1
_EP_SOCKADDR, _EP_FLAGS, _EP_CONN_REQUEST, _EP_CLIENT_SERVER = 1 << 4, 1 << 5, 1 << 6, 1 << 0
_LISTENER_SOCKADDR, _LISTENER_CONN_HANDLER = 1 << 0, 1 << 2
_AM_HANDLER_ID, _AM_HANDLER_CB = 1 << 0, 1 << 2
_OP_FLAGS: Final = 1 << 4
_SEND_EAGER, _SEND_RENDEZVOUS = 1 << 1, 1 << 2
_CLOSE_FORCE: Final = 1 << 0
_RECEIVED_RENDEZVOUS: Final = 1 << 17
_OK, _IN_PROGRESS, _BUSY, _EXCEEDS_LIMIT = 0, 1, -15, -21
#: A worker that is closed may tidy up for so long; nobody waits for what it cannot finish.
_LAST_ROUNDS: Final = 100
#: Errors that a call returns in place of a pointer: UCS_ERR_LAST up to -1.
_FIRST_ERROR: Final = -100


class UcpError(OSError):
    """A call of libucp failed."""


class UcpUnusable(RuntimeError):
    """UCX cannot be used, for the reason ``why``; ``fix`` says what to do. The message says both."""

    fix: ClassVar[str]

    def __init__(self, why: str) -> None:
        self.why = why
        super().__init__(f"{why}; {self.fix}")


class UcpMissing(UcpUnusable):
    """There is no libucp, or it is too old."""

    fix = "install Debian's libucx0 (UCX 1.13 or newer elsewhere), or set node.transport to zmq"


class Library(NamedTuple):
    ffi: Any
    ucp: Any
    ucs: Any
    malloc: Callable[[str, int], Any]

    def reason(self, status: int) -> str:
        """An error of UCX in its own words."""
        words: bytes = self.ffi.string(self.ucs.ucs_status_string(status))
        return f"UCX: {words.decode('ascii', 'replace').lower()}"

    def check(self, status: int) -> None:
        if status != _OK:
            raise UcpError(self.reason(status))

    def request(self, handle: int, kept: object = None) -> Request | None:
        """What a call that goes on in the background returned; None: it is over. Raises UcpError."""
        if _FIRST_ERROR <= handle < _OK:
            raise UcpError(self.reason(handle))
        return Request(self, handle, kept) if handle != _OK else None

    def release(self) -> tuple[int, ...]:
        """Major, minor, release."""
        numbers = [self.ffi.new("unsigned *") for _ in range(3)]
        self.ucp.ucp_get_version(*numbers)
        return tuple(number[0] for number in numbers)


@functools.cache
def load() -> Library:
    """libucp, found by the system's loader. Raises UcpMissing where it is not there or too old."""
    ucxdefaults.tell(os.environ)
    ffi = cffi.FFI()
    ffi.cdef(_DECLARATIONS.replace("128 / sizeof(long)", str(128 // ffi.sizeof("long"))) + ucpthread.DECLARATIONS)
    try:
        ucp, ucs = ffi.dlopen(SONAME), ffi.dlopen("libucs.so.0")
    except OSError as error:
        raise UcpMissing(f"{SONAME} cannot be loaded ({error})") from None
    # Not filled with zeros: a payload is about to fill it.
    lib = Library(ffi, ucp, ucs, ffi.new_allocator(should_clear_after_alloc=False))
    if lib.release() < OLDEST:
        raise UcpMissing(f"{SONAME} is of UCX {_dotted(lib.release())}, expected {_dotted(OLDEST)} or newer")
    return lib


def version() -> str:
    """The release of the library that is there. Raises UcpMissing."""
    return _dotted(load().release())


def _dotted(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))


class Request:
    """Something under way, and what has to stay in memory until it is done."""

    __slots__ = ("_handle", "_kept", "_lib", "status")

    def __init__(self, lib: Library, handle: int, kept: object) -> None:
        self._lib, self._handle, self._kept = lib, handle, kept
        #: 0 once it went well, an error of UCX (negative) once it did not
        self.status = _IN_PROGRESS

    @property
    def done(self) -> bool:
        if self.status == _IN_PROGRESS:
            self.status = self._lib.ucp.ucp_request_check_status(self._handle)
            if self.status != _IN_PROGRESS:
                self._lib.ucp.ucp_request_free(self._handle)
                self._kept = None
        return self.status != _IN_PROGRESS


#: What is done with a message: header, payload (None: there is none), and for a rendezvous its request.
Arrived = Callable[[bytes, "memoryview | None", "Request | None"], None]


class Context:
    """What the workers of a process share. ``devices``: names of the network devices to use, "" for all that UCX finds.

    Raises UcpMissing, UcpError.
    """

    def __init__(self, devices: str = "") -> None:
        self.lib = lib = load()
        out = lib.ffi.new("void **")
        lib.check(lib.ucp.ucp_config_read(lib.ffi.NULL, lib.ffi.NULL, out))
        config = out[0]
        try:
            if devices:
                lib.check(lib.ucp.ucp_config_modify(config, b"NET_DEVICES", devices.encode()))
            params = lib.ffi.new("ucp_params_t *")
            params.field_mask, params.features = _PARAM_FEATURES, _FEATURE_AM | _FEATURE_WAKEUP
            lib.check(lib.ucp.ucp_init_version(*OLDEST, params, config, out))
        finally:
            lib.ucp.ucp_config_release(config)
        self.handle = out[0]
        try:
            self.thread = UcxThread(lib)
        except BaseException:
            lib.ucp.ucp_cleanup(self.handle)
            raise

    def close(self) -> None:
        """After all of its workers."""
        self.lib.ucp.ucp_cleanup(self.handle)
        self.thread.close()


class Worker:
    """One place where messages arrive and leave. Not thread safe.

    ``arrived`` is called from :meth:`progress` with each message; a payload larger than ``limit`` bytes is not taken,
    and ``refused`` is called with the header in its place. UCX looks for broken connections, which not all of its
    transports can; it uses those that can. Raises UcpError.
    """

    def __init__(self, context: Context, arrived: Arrived, refused: Callable[[bytes], None], limit: int) -> None:
        self._lib = lib = context.lib
        self._thread = context.thread
        self._arrived, self._refused, self._limit = arrived, refused, limit
        #: UCX found the connection of an endpoint broken
        self.broken = False
        out, params = lib.ffi.new("void **"), lib.ffi.new("ucp_worker_params_t *")
        # One thread; and what is under way when a worker is closed is given up knowingly.
        params.field_mask, params.flags = _WORKER_FLAGS, _IGNORE_REQUEST_LEAK
        lib.check(lib.ucp.ucp_worker_create(context.handle, params, out))
        self._worker = out[0]
        # The library keeps these; they must live as long as the worker.
        self._on_message: Any = lib.ffi.callback("ucp_am_recv_callback_t", self._message)
        self._on_error: Any = lib.ffi.callback("ucp_err_handler_cb_t", self._error)
        handler = lib.ffi.new("ucp_am_handler_param_t *")
        handler.field_mask, handler.id, handler.cb = _AM_HANDLER_ID | _AM_HANDLER_CB, 0, self._on_message
        self._eager, self._rendezvous, self._plain, self._force = (
            lib.ffi.new("ucp_request_param_t *", {"op_attr_mask": _OP_FLAGS if flags else 0, "flags": flags})
            for flags in (_SEND_EAGER, _SEND_RENDEZVOUS, 0, _CLOSE_FORCE)
        )
        self._on_dialled: Any = None
        self._endpoint: Any = None
        self._listener: Any = None
        descriptor = lib.ffi.new("int *")
        try:
            lib.check(lib.ucp.ucp_worker_set_am_recv_handler(self._worker, handler))
            lib.check(lib.ucp.ucp_worker_get_efd(self._worker, descriptor))
        except UcpError:
            self.close()
            raise
        self._descriptor: int = descriptor[0]

    # --------------------------------------------------------------------------------------- endpoint
    def dial(self, host: str, port: int) -> None:
        """To the worker that listens there, in the background, once; ``host`` in numbers. Raises UcpError."""
        where = self._lib.ffi.new("char[]", _sockaddr(host, port))
        at = {"addr": where, "addrlen": len(where) - 1}
        self._make_endpoint(_EP_SOCKADDR | _EP_FLAGS, sockaddr=at, flags=_EP_CLIENT_SERVER)

    def listen(self, host: str) -> int:
        """Accept the first who dials, on a port of the system's choice, which is returned. Raises UcpError."""
        lib, out, params = self._lib, self._lib.ffi.new("void **"), self._lib.ffi.new("ucp_listener_params_t *")
        where = lib.ffi.new("char[]", _sockaddr(host, 0))
        self._on_dialled = lib.ffi.callback("void (*)(void *, void *)", self._dialled)
        params.field_mask, params.conn_cb = _LISTENER_SOCKADDR | _LISTENER_CONN_HANDLER, self._on_dialled
        params.sockaddr = {"addr": where, "addrlen": len(where) - 1}
        lib.check(lib.ucp.ucp_listener_create(self._worker, params, out))
        self._listener = out[0]
        found = lib.ffi.new("ucp_listener_attr_t *", {"field_mask": 1})
        lib.check(lib.ucp.ucp_listener_query(self._listener, found))
        return int.from_bytes(lib.ffi.buffer(found.sockaddr)[2:4], "big")

    def _dialled(self, request: Any, _arg: Any) -> None:
        if self._endpoint is not None:
            self._lib.ucp.ucp_listener_reject(self._listener, request)
            return
        try:
            self._make_endpoint(_EP_CONN_REQUEST, conn_request=request)
        except UcpError:
            self.broken = True

    def _make_endpoint(self, mask: int, **fields: Any) -> None:
        lib, out = self._lib, self._lib.ffi.new("void **")
        params = lib.ffi.new("ucp_ep_params_t *", fields)
        params.field_mask = mask | _EP_ERR_MODE | _EP_ERR_HANDLER
        params.err_mode, params.err_cb = _ERR_MODE_PEER, self._on_error
        lib.check(lib.ucp.ucp_ep_create(self._worker, params, out))
        self._endpoint = out[0]

    def flush(self) -> Request | None:
        """Done when the endpoint is connected and all that was sent is out; None: it is. Raises UcpError."""
        return self._lib.request(self._lib.ucp.ucp_ep_flush_nbx(self._endpoint, self._plain))

    def send(self, header: bytes, payload: memoryview | bytes, rendezvous: bool) -> Request | None:
        """Send a message over the endpoint; None: it is sent, and header and payload may go. Raises UcpError.

        Both are kept until the request is done. The payload must not change until then.
        """
        lib = self._lib
        head, body = lib.ffi.from_buffer(header), lib.ffi.from_buffer(payload)
        handle = lib.ucp.ucp_am_send_nbx(
            self._endpoint, 0, head, len(header), body, len(payload), self._rendezvous if rendezvous else self._eager
        )
        return lib.request(handle, (head, body))

    # --------------------------------------------------------------------------------------- progress
    def fileno(self) -> int:
        """Readable when there is something to do, provided that :meth:`arm` said so before."""
        return self._descriptor

    def progress(self) -> bool:
        """Let UCX work. Whether it did anything."""
        return bool(self._lib.ucp.ucp_worker_progress(self._worker))

    def arm(self) -> bool:
        """To be called before one waits for the descriptor; False: there is something to do now."""
        status = self._lib.ucp.ucp_worker_arm(self._worker)
        if status == _BUSY:
            return False
        self._lib.check(status)
        return True

    def _error(self, _arg: Any, _endpoint: Any, _status: int) -> None:
        self.broken = True

    def _message(self, _arg: Any, header: Any, header_bytes: int, data: Any, size: int, param: Any) -> int:
        lib, rendezvous = self._lib, param.recv_attr & _RECEIVED_RENDEZVOUS
        head = lib.ffi.buffer(header, header_bytes)[:] if header_bytes else b""
        if size > self._limit:
            self._refused(head)
            return _EXCEEDS_LIMIT if rendezvous else _OK
        if not rendezvous:
            self._arrived(head, memoryview(lib.ffi.buffer(data, size)[:]) if size else None, None)
            return _OK
        memory = lib.malloc("char[]", size)
        handle = lib.ucp.ucp_am_recv_data_nbx(self._worker, data, memory, size, self._plain)
        request = Request(lib, handle, memory)
        if _FIRST_ERROR <= handle <= _OK:
            request.status = handle
        # The view keeps the memory, and so does the request while the network writes to it.
        self._arrived(head, memoryview(lib.ffi.buffer(memory, size)), request)
        return _IN_PROGRESS

    def close(self) -> None:
        """With all that is under way: requests of this worker must not be asked any more."""
        lib = self._lib
        if self._endpoint is not None:
            handle = lib.ucp.ucp_ep_close_nbx(self._endpoint, self._force)
            closing = Request(lib, handle, None) if handle > _OK else None
            for _ in range(_LAST_ROUNDS):
                if not lib.ucp.ucp_worker_progress(self._worker) and (closing is None or closing.done):
                    break
        if self._listener is None:
            lib.ucp.ucp_worker_destroy(self._worker)
        else:
            # Somebody may be dialling.
            with self._thread.held():
                lib.ucp.ucp_listener_destroy(self._listener)
                lib.ucp.ucp_worker_destroy(self._worker)
        # They hold this object in turn, and large payloads must not wait for the garbage collector.
        self._on_message = self._on_error = self._on_dialled = None


def _sockaddr(host: str, port: int) -> bytes:
    """What <netinet/in.h> calls struct sockaddr_in. No other: over IPv6 UCX 1.13 damages the memory of the process."""
    return struct.pack("=H", socket.AF_INET) + struct.pack("!H4s8x", port, socket.inet_aton(host))
