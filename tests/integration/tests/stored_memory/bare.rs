//! An inline image is CRIU's own: CRIU restores it without firn.

use anyhow::{Result, ensure};
use firn_lab::{Built, on};
use firn_node::Platform;

use crate::stored_memory::host;

/// Dumps a process with 64 MiB of memory, every other MiB of it zero, into a directory where CRIU's pages go
/// nowhere; firn-hook writes them while the process stands still; CRIU restores the process. The size of the
/// pages file and the process's own lines are printed.
const STEPS: &str = r#"set -e
# What the node's init has open, which CRIU does not find in the node.
for fd in /proc/$$/fd/*; do fd=${fd##*/}; [ $fd -le 2 ] || eval "exec $fd<&-"; done
mkdir -p /srv/bare/image
cd /srv/bare
setsid memory-hog --mib 64 --fill half-zero --huge /srv/bare/lines </dev/null >/dev/null 2>&1 &
job=$!
lines() {
  for i in $(seq 600); do
    ! grep -qs "" lines || [ "$(wc -l <lines)" != "$1" ] || return 0
    sleep 0.05
  done
  exit 9
}
trap 'tail -n 4 image/*.log >&2' EXIT
lines 1
ln -s /dev/null image/pages-1.img
criu dump -t $job -D image --leave-stopped -o dump.log >/dev/null
rest='"image":"/srv/bare/image","processes":[{"pid":PID,"inside":PID}],"bulk":[]'
echo "{\"request\":{\"rest\":{$rest}},\"shown\":null}" | sed "s/PID/$job/g" | firn-hook memory >/dev/null
kill -KILL $job
# Its number is free when it is reaped, long after it has lost its memory and its program.
wait $job || :
criu restore -D image -d -o restore.log >/dev/null
kill -USR1 $job
lines 2
stat -c %s image/pages-1.img
cat lines
kill -KILL $job"#;

pub fn criu_alone_restores_what_firn_copied(platform: Platform) -> Result<()> {
    on([host(platform, "sm-bare", 1)?], |[host]| {
        let hog = Built::for_tests()?.program("memory-hog");
        host.node().install(hog, "/usr/local/bin/memory-hog", 0o755)?;
        let printed = host.node().run(&["bash", "-c", STEPS])?.stdout;
        let lines: Vec<_> = printed.lines().collect();
        let [size, ready, verdict] = lines[..] else {
            anyhow::bail!("printed:\n{printed}");
        };
        let sum = ready.strip_prefix("ready ").unwrap_or_default();
        ensure!(verdict == format!("OK {sum}"), "{printed}");
        let mib = size.parse::<u64>()? >> 20;
        ensure!((32..48).contains(&mib), "the pages file has {mib} MiB");
        Ok(())
    })
}
