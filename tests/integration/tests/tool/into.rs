//! A restore into a container that is there, while somebody else works on containerd; what is printed with
//! `--quiet`.

use anyhow::{Result, ensure};
use firn_lab::{Container, GpuHost, failure, on};
use firn_node::Platform;

use super::failures::refused;
use super::{copy, counter, host, nothing_left};

const RESTORE: [&str; 5] = ["restore", "/srv/job.tar", "--into", "job", "--quiet"];

/// Has containerd remove what nothing names, and waits for that.
const COLLECT: &str = "ctr leases create --id none >/dev/null && ctr leases delete --sync none >/dev/null";

/// The node's runc.
const RUNC: &str = "exec /usr/sbin/runc \"$@\"\n";

/// What containerd has of the container, without the times, and the names of its snapshots.
fn known(host: &GpuHost) -> Result<String> {
    let script = "ctr containers info job | grep -v -e CreatedAt -e UpdatedAt; \
                  ctr snapshots list | grep ^job | cut -d ' ' -f 1";
    Ok(host.node().run(&["sh", "-c", script])?.stdout)
}

/// The container's files are not lost to containerd's removal of what nothing names.
pub fn a_restore_that_fails_costs_a_container_no_file(platform: Platform) -> Result<()> {
    on([host(platform, "to-into", 1)?], |[host]| {
        let job = counter(host)?;
        host.firn(&["checkpoint", "job", "/srv/job.tar"])?;
        refused(host, &RESTORE, "FIRN-TASK-EXISTS")?;
        job.goes_on(3)?;
        job.exec(&["sh", "-c", "echo own >/own"])?;
        job.task(&["kill", "--signal", "SIGKILL"])?;
        job.becomes("STOPPED")?;
        let name = refused(host, &RESTORE[..2], "FIRN-EXISTS")?;
        ensure!(name.contains("--into ID"), "{name}");
        let before = known(host)?;
        // At the last moment, when the container has the snapshot of the restore.
        host.replace_runc(&format!(
            "#!/bin/sh\ncase \"$*\" in *' restore '*) {COLLECT}; exit 1;; esac\n{RUNC}"
        ))?;
        failure(host.node().run(&[&["firn"], &RESTORE[..]].concat()))?;
        host.replace_runc(&format!("#!/bin/sh\n{RUNC}"))?;
        host.node().run(&["sh", "-c", COLLECT])?;
        let after = known(host)?;
        ensure!(before == after, "{before} became {after}");
        let own = "ctr snapshots mounts /mnt job | sh && cat /mnt/own; umount /mnt";
        let own = host.node().run(&["sh", "-c", own])?.stdout;
        ensure!(own == "own\n", "{own}");
        nothing_left(host)?;
        expect_no_progress(host)?;
        copy(host, "job", &host.uuids()[..1])?;
        host.node().run(&["sh", "-c", COLLECT])?;
        Container::known(host, "job").counting(1).goes_on(3)?;
        let now = known(host)?;
        let snapshots = now.lines().filter(|line| line.starts_with("job")).count();
        ensure!(snapshots == 1, "{now}");
        Container::known(host, "job").remove()?;
        nothing_left(host)?;
        host.idle()
    })
}

/// Restores, and looks at what is printed meanwhile.
fn expect_no_progress(host: &GpuHost) -> Result<()> {
    let script = format!("firn {} 2>/srv/progress", RESTORE.join(" "));
    let output = host.node().run(&["sh", "-c", &script])?.stdout;
    ensure!(output.starts_with("job runs again, pid "), "{output}");
    let progress = host.node().read("/srv/progress")?;
    ensure!(progress.is_empty(), "{progress}");
    Ok(())
}
