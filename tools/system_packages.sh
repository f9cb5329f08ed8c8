#!/bin/sh
# Installs, as root, the Debian packages that the system tests use; without root it says what is missing and goes on,
# and the tests that need it are skipped with a reason. With the argument "long" also those of `make test-long`.
set -eu

# command or shared library, package, what for
needs='
ip      iproute2    network namespaces and links
tc      iproute2    links shaped to a given rate
ss      iproute2    killing live connections
nft     nftables    partitions and dropped packets
unshare util-linux  namespaces without root
systemd-nspawn systemd-container booting a machine with the units of deploy/systemd
slurmd  slurmd      prolog and epilog on two nodes
slurmctld slurmctld their controller
sbatch  slurm-client the commands of their users
munged  munge       which the messages of Slurm are signed by
promtool prometheus scraping daemons for real; alert rules and their tests
chromium chromium  opening the dashboard in a real browser
etcd    etcd-server deciding who is left of a job that loses nodes
zsh     zsh         completing what is typed after gcctl
fish    fish        the same
npm     npm         buf, which lints admin.proto and is a foreign gRPC client
libucp.so.0 libucx0 the ucx transport
'
[ "${1:-}" != long ] || needs="$needs
buildah buildah     building and running the images of deploy/docker
debootstrap debootstrap the Debian they are built on"

PATH=$PATH:/usr/sbin:/sbin
# Whether there is a command of that name, or the loader knows a library of it.
there() {
    case $1 in
    *.so.*) ldconfig -p | grep -qF "$1 " ;;
    *) command -v "$1" >/dev/null ;;
    esac
}
missing=$(echo "$needs" | while read -r command package why; do
    [ -z "$command" ] || there "$command" || echo "$package"
done | sort -u | tr '\n' ' ')

if [ -z "$missing" ]; then
    echo "system packages: all there"
elif [ "$(id -u)" != 0 ]; then
    echo "system packages: missing: $missing(not root, so not installed; tests that need them are skipped)"
elif ! command -v apt-get >/dev/null; then
    echo "system packages: missing: $missing(no apt-get here; tests that need them are skipped)"
else
    echo "system packages: installing: $missing"
    if ! out=$(apt-get update -q 2>&1 &&
        DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends $missing 2>&1); then
        echo "$out" | tail -n 30 >&2
        echo "system packages: apt-get failed; tests that need them are skipped" >&2
    fi
fi
