//! What CRIU has made of an image is compared with the spec before any of it runs.

use anyhow::{Context, Result, ensure};
use firn_lab::{Container, FIRN, GpuHost, STOCK, SimGpu, failure, nothing_left, on};
use firn_node::{Platform, wait_for};

use crate::image_privileges::cases::{CASES, HOST_FILE, VICTIM};
use crate::image_privileges::{GPU, HOSTILE, LIMIT, images, make, restores};

/// firn-hook as it is, but for the first comparison, which finds nothing.
const BLIND: &str = "#!/bin/bash
case \"$1\" in check-image) echo null ;; *) exec -a \"$0\" /usr/local/bin/firn-hook \"$@\" ;; esac
";

/// runc as it is, but that a container which it has restored is moved into another's cgroup.
const ASTRAY: &str = "#!/bin/sh
/usr/sbin/runc \"$@\"
code=$?
case \" $* \" in *' restore '*)
  pid=$(cat /run/containerd/io.containerd.runtime.v2.task/default/job/*.pid)
  for procs in $(find /sys/fs/cgroup -path '*/victim/cgroup.procs'); do echo $pid >$procs; done ;;
esac
exit $code
";

/// A restore by this image fails after runc was called, with this in its message, and nothing is left.
fn rolled_back(host: &GpuHost, image: &str, expected: &str) -> Result<()> {
    let output = failure(Container::restore(host, "job", image, 1).map(drop))?;
    ensure!(
        output.contains("FIRN-IMAGE-PRIVILEGE:") && output.contains("was rolled back"),
        "{output}"
    );
    ensure!(output.contains(expected), "no {expected:?} in:\n{output}");
    // ctr leaves the task of a failed start, which was never running.
    let _ = host.ctr(&["tasks", "delete", "--force", "job"], "")?;
    host.node().run(&["ctr", "containers", "delete", "job"])?;
    nothing_left(host, "job")?;
    let memory = host.gpu_memory()?;
    ensure!(
        memory.iter().all(|mib| *mib == 0),
        "GPU memory in use: {memory:?}"
    );
    Ok(())
}

/// Tasks that are not in the container's own cgroup are not looked for in another, whose processes are
/// others'.
pub fn processes_of_other_containers_are_not_continued(platform: Platform) -> Result<()> {
    let host = GpuHost::for_test(platform, "hostile-cgroup", &[SimGpu::h200(1)])?;
    on([host], |[host]| {
        host.node().write(HOST_FILE, "the host's")?;
        images(host)?;
        restores(host, GPU)?;
        // It stops itself: whoever continues it lets it write.
        let stopped = "kill -STOP $$; echo continued >/log; sleep 100000";
        let script = format!("sh -c '{stopped}' & wait");
        let victim = Container::run(host, VICTIM, &["--runtime", STOCK], &["sh", "-c", &script])?;
        wait_for("the other's process to stop", LIMIT, || {
            let processes = host.node().processes();
            let own = processes
                .iter()
                .find(|process| process.args.last().is_some_and(|last| last == stopped));
            let Some(own) = own else {
                return Ok(None);
            };
            let status = host
                .node()
                .run(&["cat", &format!("/proc/{}/status", own.pid)])?
                .stdout;
            Ok(status.contains("T (stopped)").then_some(()))
        })?;
        host.replace_runc(ASTRAY)?;
        rolled_back(host, GPU, "is not in the container's cgroup")?;
        let log = host
            .node()
            .path(format!("{}/{VICTIM}/rootfs/log", firn_lab::BUNDLES));
        ensure!(!log.exists(), "a process of others was continued");
        ensure!(victim.status()? == "RUNNING", "the other container has ended");
        victim.remove()?;
        host.replace_runc("#!/bin/sh\nexec /usr/sbin/runc \"$@\"\n")?;
        restores(host, GPU)
    })
}

/// What gets past the first comparison is found in what CRIU has made, before any of it runs.
pub fn processes_made_by_criu_are_compared_before_they_run(platform: Platform) -> Result<()> {
    let host = GpuHost::for_test(platform, "hostile-made", &[SimGpu::h200(1)])?;
    on([host], |[host]| {
        host.node().write(HOST_FILE, "the host's")?;
        images(host)?;
        host.node().write("/usr/local/bin/blind-hook", BLIND)?;
        host.node().run(&["chmod", "755", "/usr/local/bin/blind-hook"])?;
        host.configure("[hook]\npath = \"/usr/local/bin/blind-hook\"\n")?;
        for (what, expected) in MADE {
            let case = CASES.iter().find(|case| case.what == *what);
            make(
                host,
                GPU,
                FIRN,
                case.with_context(|| format!("no case {what}"))?.edit,
            )?;
            rolled_back(host, HOSTILE, expected).with_context(|| (*what).to_owned())?;
            host.remove_image(HOSTILE)?;
        }
        host.configure("")?;
        restores(host, GPU)
    })
}

/// What CRIU makes of an image, and what of it the error names.
const MADE: &[(&str, &str)] = &[
    (
        "one capability in the bounding set",
        "the bounding capabilities of thread",
    ),
    ("no no_new_privs", "no_new_privs of thread"),
    ("no seccomp", "seccomp of thread"),
    ("another user", "a user id of thread"),
    ("raised limits", "RLIMIT_NOFILE of process"),
    ("the host's network namespace", "the network namespace"),
    ("the host's uts namespace", "the uts namespace"),
    ("a writable /proc/sys", "the mount /proc/sys"),
];
