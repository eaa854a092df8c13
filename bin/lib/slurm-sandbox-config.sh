# Part of bin/slurm-sandbox: ports, devices, cgroups and configuration files.
# shellcheck shell=bash

choose_ports() { # a block of ports nobody uses: the one of last time, else from a place that depends on DIR
  local used port first last hex block; used=$(listening); first=$(($(printf %s "$DIR" | cksum | cut -d' ' -f1) % 122)); last=$((first + 121))
  for port in $(cat "$DIR/etc/port" 2>/dev/null) $(seq "$first" "$last" | awk '{ print 17000 + $1 % 122 * 128 }'); do
    for ((block = port; block < port + 5 + GPU_NODES + CPU_NODES; block++)); do
      printf -v hex %04X "$block"
      [[ $used != *" $hex "* ]] || continue 2
    done
    echo "$port" >"$DIR/etc/port"; PORT=$port
    return
  done
  die 1 "no free ports between 17000 and 32616"
}
make_gpus() { # device nodes that no driver serves; plain files where there may be no device nodes
  local i; for ((i = 0; i < GPUS; i++)); do
    [ -e "$DIR/dev/gpu$i" ] || mknod -m 666 "$DIR/dev/gpu$i" c 60 "$i" 2>/dev/null || : >"$DIR/dev/gpu$i"
  done
}
make_cgroups() { # a tree of our own inside each hierarchy, so that sandboxes side by side don't share job_1
  local c; for c in freezer memory cpuset cpuacct devices; do
    mkdir -p "/sys/fs/cgroup/$c/$CGROUP_NAME" 2>/dev/null || die 77 "--cgroup: no writable cgroup v1 hierarchy $c below /sys/fs/cgroup"
    ln -sfnT "/sys/fs/cgroup/$c/$CGROUP_NAME" "$DIR/cgroup/$c"
  done
  for c in cpus mems; do cat "/sys/fs/cgroup/cpuset/cpuset.$c" >"/sys/fs/cgroup/cpuset/$CGROUP_NAME/cpuset.$c"; done
}
node_lines() { # PREFIX COUNT FIRST-PORT REST
  local n; for ((n = 1; n <= $2; n++)); do
    printf 'NodeName=%s%02d NodeHostname=%s NodeAddr=127.0.0.1 Port=%d CPUs=8 RealMemory=16000 %s State=UNKNOWN\n' "$1" $n "$HOST" $(($3 + n)) "$4"
  done
}
configure() {
  local gpus cpus host; host=$(uname -n); HOST=${host%%.*}
  printf -v gpus 'gpu[01-%02d]' "$GPU_NODES"; printf -v cpus 'cpu[01-%02d]' "$CPU_NODES"
  cat >"$CONF" <<CONF
ClusterName=sandbox
SlurmctldHost=$HOST(127.0.0.1)
SlurmctldPort=$PORT
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# cred_expire: how long a requeued job waits before it may start again (120 s by default), and a node has to start a job
AuthInfo=socket=$MUNGE,cred_expire=15
CommunicationParameters=NoAddrCache
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
StateSaveLocation=$DIR/state
SlurmdSpoolDir=$DIR/spool/%n
SlurmctldPidFile=$DIR/pid/slurmctld.pid
SlurmdPidFile=$DIR/pid/slurmd.%n.pid
SlurmctldLogFile=$DIR/log/slurmctld.log
SlurmdLogFile=$DIR/log/slurmd.%n.log
SlurmctldDebug=verbose
SlurmdDebug=verbose
# one host plays many nodes: the sizes in this file hold, whatever slurmd finds
SlurmdParameters=config_overrides
# time-outs, short on purpose, but longer than a busy machine may hold a daemon up
SlurmctldTimeout=10
SlurmdTimeout=30
InactiveLimit=0
KillWait=5
MinJobAge=300
MessageTimeout=20
OverTimeLimit=0
CompleteWait=0
UnkillableStepTimeout=120
TCPTimeout=2
BatchStartTimeout=60
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,sched_min_interval=0,bf_interval=1,bf_min_age_reserve=0,bf_resolution=1,max_rpc_cnt=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
PriorityType=priority/basic
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PreemptExemptTime=0
SlurmctldParameters=preempt_send_user_signal
JobRequeue=1
DefMemPerCPU=256
MaxArraySize=$MAX_ARRAY
MaxJobCount=$((MAX_ARRAY > 9000 ? MAX_ARRAY + 1000 : 10000))
GresTypes=gpu
JobCompType=jobcomp/filetxt
JobCompLoc=$DIR/log/jobcomp.txt
CONF
  echo CgroupAutomount=no >"$DIR/etc/cgroup.conf"
  if [ "$CGROUP" = 1 ]; then
    cat >>"$CONF" <<CONF
ProctrackType=proctrack/cgroup
TaskPlugin=task/cgroup
JobAcctGatherType=jobacct_gather/cgroup
JobAcctGatherFrequency=task=2
CONF
    cat >>"$DIR/etc/cgroup.conf" <<CONF
CgroupPlugin=cgroup/v1
CgroupMountpoint=$DIR/cgroup
ConstrainRAMSpace=yes
ConstrainSwapSpace=no
ConstrainCores=no
ConstrainDevices=no
CONF
  else
    cat >>"$CONF" <<CONF
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
JobAcctGatherParams=OverMemoryKill
CONF
  fi
  if [ "$ACCOUNTING" = 1 ]; then
    # connections to slurmdbd take munge's socket from AccountingStoragePass
    cat >>"$CONF" <<CONF
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort=$((PORT + 1))
AccountingStoragePass=$MUNGE
AccountingStorageTRES=gres/gpu
AccountingStoreFlags=job_comment
CONF
    # StorageHost=localhost: by the Unix socket that MYSQL_UNIX_PORT names
    (umask 077; cat >"$DIR/etc/slurmdbd.conf") <<CONF
AuthType=auth/munge
AuthInfo=socket=$MUNGE
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort=$((PORT + 1))
SlurmUser=root
LogFile=$DIR/log/slurmdbd.log
PidFile=$DIR/pid/slurmdbd.pid
DebugLevel=verbose
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm_acct_db
CommitDelay=0
CONF
  else
    echo AccountingStorageType=accounting_storage/none >>"$CONF"
  fi
  {
    node_lines gpu "$GPU_NODES" $((PORT + 4)) "Gres=gpu:fake:$GPUS Feature=gpu"
    node_lines cpu "$CPU_NODES" $((PORT + 4 + GPU_NODES)) Feature=cpu
    echo "PartitionName=gpu     Nodes=$gpus PriorityTier=10 PreemptMode=OFF     Default=YES MaxTime=1-0 DefaultTime=10 State=UP"
    echo "PartitionName=preempt Nodes=$gpus PriorityTier=1  PreemptMode=REQUEUE GraceTime=20 MaxTime=1-0 DefaultTime=10 State=UP"
    [ "$CPU_NODES" = 0 ] || echo "PartitionName=cpu     Nodes=$cpus PriorityTier=5  PreemptMode=OFF     MaxTime=1-0 DefaultTime=10 State=UP"
  } >>"$CONF"
  echo "NodeName=$gpus Name=gpu Type=fake File=$DIR/dev/gpu[0-$((GPUS - 1))]" >"$DIR/etc/gres.conf"
}
