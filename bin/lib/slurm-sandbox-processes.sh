# Part of bin/slurm-sandbox: which processes belong to a sandbox, and their end.
# shellcheck shell=bash disable=SC2046,SC2086,SC2116

pid_of() { # DAEMON: its pid if it is alive. A pid file only says where to look: the number may be somebody else's by now
  local pid
  pid=$(cat "$DIR/pid/$1.pid" 2>/dev/null) && [[ $pid =~ ^[0-9]+$ ]] || return 1
  [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = "${1%%.*}" ] || return 1
  [ "$EUID" != 0 ] || grep -qszxF "$MARK" "/proc/$pid/environ" || return 1
  echo "$pid"
}
pids() { sed -n 's,^/proc/\([0-9]*\)/environ$,\1,p'; }
cage() { # a cgroup of the sandbox's own, where there may be one: what is started in it can't leave it
  local hierarchy
  for hierarchy in /sys/fs/cgroup/pids /sys/fs/cgroup/freezer /sys/fs/cgroup; do
    [ -w "$hierarchy/cgroup.procs" ] && mkdir -p "$hierarchy/$CGROUP_NAME" 2>/dev/null || continue
    echo "$hierarchy/$CGROUP_NAME/cgroup.procs"
    return
  done
  echo /dev/null
}
caged() { # what runs in such a cgroup; dead processes that nobody waited for don't count
  local pid
  for pid in $(find /sys/fs/cgroup/{,*/}"$CGROUP_NAME" -name cgroup.procs -exec cat {} + 2>/dev/null | sort -un); do
    ! readlink "/proc/$pid/exe" >/dev/null 2>&1 || echo "$pid"
  done
}
daemons() { { grep -lszxF "$MARK" /proc/[0-9]*/environ || true; } | pids; } # slurmstepd inherits the mark
jobs_of() { # processes of jobs: by descent from a slurmstepd, and by environment and by cgroup for those that left it
  local files=()
  mapfile -t files < <(grep -lszxF "SLURM_CONF=$CONF" /proc/[0-9]*/environ || true)
  { ((${#files[@]} == 0)) || grep -lszxF "SLURM_CLUSTER_NAME=sandbox" "${files[@]}" || true; } | pids
  { cat /proc/[0-9]*/stat 2>/dev/null || true; } | awk -v ours=" $(daemons | tr '\n' ' ')" '
    { pid = $1; step = /\(slurmstepd\)/; sub(/^.*\) /, ""); up[pid] = $2; if (step && index(ours, " " pid " ")) steps[pid] }
    END { for (pid in up) { for (p = pid; p > 1 && !(p in steps); p = up[p]); if (p in steps) print pid } }'
}
stop() { # SECONDS DAEMON...: asks them to end, and waits
  local daemon left tries=$(($1 * 20)); shift
  for daemon; do pid_of "$daemon" >/dev/null && kill -TERM "$(pid_of "$daemon")" 2>/dev/null || true; done
  for (( ; tries > 0; tries--)); do
    left=0; for daemon; do ! pid_of "$daemon" >/dev/null || left=1; done
    [ $left = 1 ] || return 0
    sleep 0.05
  done
}
nodes() { sed -n 's/^NodeName=\([a-z0-9]*\) .*/\1/p' "$CONF"; }
expected() { # the daemons that should run
  echo munged; ! grep -q accounting=1 "$DIR/etc/options" || printf '%s\n' mariadbd slurmdbd
  echo slurmctld; nodes | sed 's/^/slurmd./'
}
listening() { # TCP ports somebody listens at, in hexadecimal
  awk '$4 == "0A" { split($2, a, ":"); printf " %s ", a[2] }' /proc/net/tcp /proc/net/tcp6 2>/dev/null || true
}
until_true() { # SECONDS COMMAND...
  local deadline=$(($(date +%s) + $1)); shift
  until "$@"; do (($(date +%s) < deadline)) || return 1; sleep 0.05; done
}

take_down() { # ends everything that belongs to DIR; state and logs stay
  local tries left cgroup daemon
  if [ "$WIPE" = 0 ] && [ -e "$CONF" ]; then
    if pid_of slurmctld >/dev/null; then
      SLURM_CONF=$CONF timeout 5 squeue -h -o %A 2>/dev/null | SLURM_CONF=$CONF timeout 5 xargs -r scancel 2>/dev/null || true
    fi
    # shellcheck disable=SC2046
    stop 5 slurmctld $(nodes | sed 's/^/slurmd./')
    left=$(jobs_of); [ -z "$left" ] || kill -KILL $left 2>/dev/null || true
    for daemon in slurmdbd mariadbd munged; do stop 10 $daemon; done
  fi
  for ((tries = 0; tries < 600; tries++)); do # a busy machine may take seconds to end what was killed
    left=$(daemons; jobs_of; caged)
    [ -n "$left" ] || break
    kill -KILL $left 2>/dev/null || true
    sleep 0.05
  done
  for cgroup in /sys/fs/cgroup/{,*/}"$CGROUP_NAME"; do
    for ((tries = 0; tries < 200; tries++)); do
      [ -d "$cgroup" ] || break
      find "$cgroup" -depth -type d -exec rmdir {} \; 2>/dev/null || sleep 0.05
    done
  done
  rm -f "$DIR"/pid/*.pid
  [ -z "$left" ] || die 1 "can't be ended: processes $(echo $left)"
}
