#!/bin/sh
# Run a job in a QEMU guest that sees this host's file system, read-only: Python, a venv, SPDK
# are there at their own paths, and nothing is copied.  /run, /dev/shm and /out are memory.
#   run-hosted.sh FOLDER [OUTDIR]
# FOLDER/job.sh runs as root in FOLDER's copy; /mnt/out there comes back as OUTDIR
# ($LAB/hosted-out): stdout (with stderr), dmesg, rc, and what the job wrote to it.
# Prints the job's stdout, exits with the job's status; 125: the guest itself failed,
# 124: the job was over its limit (its stdout and dmesg still come back).
# Env: LAB      the directory of mk-initramfs.sh's images ($TMPDIR/kvdev-lab), made with
#               EXTRA_MODS="9p 9pnet_virtio ..."
#      MODS     modules to load before the job, "nvme-rdma ib_uverbs"
#      LINK     path of run-nvmet.sh's LINK: eth1 is 192.0.2.2 on its wire, rxe0 its RDMA device
#      LIMIT_S  seconds the job may take (300)
#      BOOT_S   seconds the guest may take to start it (120), else it is booted again, twice at most
#      MEM, SMP, ACCEL   guest MiB (1024), CPUs (2), QEMU accelerator (tcg)
#      APPEND   more for the kernel's command line, "hugepages=256"
set -eu
die() { echo "run-hosted: $*" >&2; exit 125; }
[ $# -ge 1 ] && [ $# -le 2 ] || { sed -n '2,5p' "$0" >&2; exit 2; }
LAB=${LAB:-${TMPDIR:-/tmp}/kvdev-lab}
case $LAB in /*) ;; *) LAB=$PWD/$LAB;; esac
folder=$1 out=${2:-$LAB/hosted-out} limit=${LIMIT_S:-300}
for f in vmlinuz target.img; do [ -e "$LAB/$f" ] || die "no $LAB/$f: run mk-initramfs.sh first"; done
[ -r "$folder/job.sh" ] || die "no $folder/job.sh"

tmp=$(mktemp -d "$LAB/hosted.XXXXXX"); pid=
clean() { if [ -n "$pid" ]; then kill "$pid" 2>/dev/null || :; fi; rm -rf "$tmp"; }
. "$(dirname "$0")/guest.sh"
trap clean EXIT; trap 'exit 130' INT; trap 'exit 143' TERM
(cd "$folder" && tar cf "$tmp/job.tar" .)
truncate -s 64M "$tmp/out.tar"
link=; linkpar=
if [ -n "${LINK:-}" ]; then
    link="-netdev stream,id=n1,server=off,addr.type=unix,addr.path=$LINK"
    link="$link -device virtio-net-pci,netdev=n1,mac=52:54:00:00:02:02,romfile="; linkpar=lab.link=192.0.2.2
fi
boot() {
    # shellcheck disable=SC2086   # $link is a list of words
    qemu-system-x86_64 -name lab-hosted -M pc -accel "${ACCEL:-tcg,thread=multi}" -cpu Nehalem,+rdrand \
        -smp "${SMP:-2}" -m "${MEM:-1024}" -nodefaults -no-reboot -display none -serial "file:$tmp/log" \
        -kernel "$LAB/vmlinuz" -initrd "$LAB/target.img" \
        -append "console=ttyS0 quiet panic=-1 mitigations=off no_timer_check lab.role=hosted lab.limit=$limit $linkpar \
    lab.mods=$(echo "${MODS:-}" | tr ' ' ,) ${APPEND:-}" \
        -drive "file=$tmp/job.tar,format=raw,if=virtio,readonly=on" \
        -drive "file=$tmp/out.tar,format=raw,if=virtio" \
        -fsdev local,id=fs0,path=/,security_model=none,readonly=on,multidevs=remap \
        -device virtio-9p-pci,fsdev=fs0,mount_tag=host \
        -netdev user,id=n0,restrict=on -device virtio-net-pci,netdev=n0,romfile= $link </dev/null &
}
[ -z "$link" ] || boot_tries=1       # the other end's wire stays dead once this guest has gone
run_guest
rm -rf "$out"; mkdir -p "$out"
tar xf "$tmp/out.tar" -C "$out" || die "no results"
cp "$tmp/log" "$out/console"
cat "$out/stdout"
rc=$(cat "$out/rc")
[ "$rc" != 143 ] || rc=124        # busybox timeout's status
exit "$rc"
