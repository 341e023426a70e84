# Sourced by the scripts that run a job in a guest: boot it, wait for its end.
# Expects die, $tmp, $limit and a function boot that starts QEMU in the background with
# its console in $tmp/log; sets pid, which the caller's trap kills.
# Env: BOOT_S   seconds until the job must have started (120)
boot_limit=${BOOT_S:-120} boot_tries=3

alive() { kill -0 "$pid" 2>/dev/null; }

# An emulated kernel now and then hangs before it has printed a word or run a program:
# boot it again then.  From the job's start on a hang is a finding, and final.
run_guest() {
    try=1
    while :; do
        : >"$tmp/log"; boot; pid=$!; n=0
        until grep -qs 'LAB: ' "$tmp/log" || ! alive || [ $n -ge $((boot_limit * 5)) ]; do sleep 0.2; n=$((n + 1)); done
        if ! alive || grep -qs 'LAB: ' "$tmp/log"; then break; fi
        kill -9 "$pid"; wait "$pid" 2>/dev/null || :; pid=
        tail -n 20 "$tmp/log" >&2
        [ $try -lt $boot_tries ] || die "the guest did not boot in $boot_limit s, $boot_tries times"
        try=$((try + 1)); echo "the guest did not boot in $boot_limit s: once more, $try of $boot_tries" >&2
    done
    n=0
    while alive; do
        [ $n -lt $(((limit + 90) * 5)) ] || { tail -n 20 "$tmp/log" >&2; die "the guest hangs"; }
        sleep 0.2; n=$((n + 1))
    done
    wait "$pid" || { pid=; die "QEMU failed"; }
    pid=
    grep -qs 'LAB: job ended' "$tmp/log" || { tail -n 20 "$tmp/log" >&2; die "the guest failed"; }
}
