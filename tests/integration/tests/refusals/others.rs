//! Refusals for what others do to a container: another tool at the driver, a debugger, a stranger in its
//! cgroup; and for a file that its spec names.

use anyhow::{Result, ensure};
use firn_lab::{Container, GpuHost, STOCK, SimGpu, failure, nothing_left, on};
use firn_node::{Platform, wait_for};

use super::{LIMIT, audited, fails, host, refused};

/// Traces a process, which runs on, until it is killed itself; writes its own pid to a file.
const DEBUGGER: &str = "syscall(101, 0x4206, $ARGV[0] + 0, 0, 0) == 0 or die $!; \
    open F, '>', '/tmp/debugger.new'; print F $$; close F; \
    rename '/tmp/debugger.new', '/tmp/debugger'; sleep 1000";

/// Puts a process into the container's cgroups and gives its pid.
const STRANGER: &str = "setsid sleep 1000 >/dev/null 2>&1 & \
    for dir in /sys/fs/cgroup /sys/fs/cgroup/*; do \
        test -e $dir/cgroup.procs || continue; \
        mkdir -p $dir/default/job; echo $! 2>/dev/null >$dir/default/job/cgroup.procs || true; \
    done; echo $!";

/// Who is in the container's cgroups.
const MEMBERS: &str = "cat /sys/fs/cgroup/default/job/cgroup.procs \
                       /sys/fs/cgroup/*/default/job/cgroup.procs 2>/dev/null || true";

/// The driver restores no process in which a GPU may access large memory of another one, and nothing shows
/// the access.
pub fn a_process_on_two_gpus_is_refused_unless_its_owner_knows_of_no_access(
    platform: Platform,
) -> Result<()> {
    let gpus = [SimGpu::h200(1), SimGpu::h200(2)];
    on([GpuHost::for_test(platform, "rf-peer", &gpus)?], |[host]| {
        host.watch_runc()?;
        let both = ["--gpu", "0,1"];
        let job = Container::count(host, "job", &["0", "1"], 2, &both)?;
        job.goes_on(3)?;
        let (status, report) = audited(host)?;
        ensure!(
            status == "1" && report.contains("FIRN-PEER"),
            "audit: {status}: {report}"
        );
        let output = refused(&job, host, "FIRN-PEER")?;
        ensure!(output.contains("(nvidia0, nvidia1)"), "{output}");
        job.remove()?;
        // One that only sees both.
        let job = Container::count(host, "job", &["0", "1"], 1, &["--gpu", "1"])?;
        job.goes_on(3)?;
        job.checkpoint("checkpoint/one")?;
        job.remove()?;
        let owner = ["--annotation", "firn.dev/peer-access=none"];
        let job = Container::count_with(host, "job", &["0", "1"], 2, &owner, &both)?;
        job.goes_on(3)?;
        job.checkpoint("checkpoint/both")?;
        job.goes_on(3)?;
        job.remove()?;
        host.idle()
    })
}

pub fn what_the_driver_has_refused_once_is_refused_by_that_reason(platform: Platform) -> Result<()> {
    on([host(platform, "rf-once", 1)?], |[host]| {
        let job = Container::count(host, "job", &["0"], 1, &[])?;
        job.goes_on(3)?;
        // As for managed memory that nothing shows.
        let fault = [
            "--call",
            "checkpoint",
            "--times",
            "1",
            "--error",
            "CUDA_ERROR_NOT_SUPPORTED",
        ];
        host.fault(&fault)?;
        fails(&job, host, "FIRN-GPU-UNSUPPORTED")?;
        host.no_faults()?;
        host.watch_runc()?;
        let (status, report) = audited(host)?;
        ensure!(
            status == "1" && report.contains("FIRN-GPU-REFUSED"),
            "audit: {status}: {report}"
        );
        let output = refused(&job, host, "FIRN-GPU-REFUSED")?;
        ensure!(output.contains("CUDA_ERROR_NOT_SUPPORTED"), "{output}");
        job.remove()?;
        let job = Container::count(host, "job", &["0"], 1, &[])?;
        job.goes_on(3)?;
        job.checkpoint("checkpoint/fresh")?;
        // A profiler's answer is at the lock, spoils nothing, and is named.
        host.fault(&[
            "--call",
            "lock",
            "--times",
            "1",
            "--error",
            "CUDA_ERROR_NOT_SUPPORTED",
        ])?;
        let output = fails(&job, host, "FIRN-GPU-UNSUPPORTED")?;
        ensure!(output.contains("torch.profiler"), "{output}");
        host.no_faults()?;
        job.checkpoint("checkpoint/again")?;
        job.remove()?;
        host.idle()
    })
}

pub fn changes_by_others_are_named_and_cost_nothing(platform: Platform) -> Result<()> {
    on([host(platform, "rf-other", 1)?], |[host]| {
        let unreadable = ["--annotation", "org.criu.config=/etc"];
        let output = failure(Container::count_with(host, "job", &["0"], 1, &unreadable, &[]).map(drop))?;
        ensure!(output.contains("FIRN-CRIU-CONFIG:"), "{output}");
        host.node().run(&["ctr", "containers", "delete", "job"])?;
        nothing_left(host, "job")?;

        let job = Container::count(host, "job", &["0"], 1, &[])?;
        job.goes_on(3)?;
        let pid = job.pid()?.to_string();
        host.node().run(&["cuda-step", "lock", &pid])?;
        let output = failure(job.checkpoint("checkpoint/job"))?;
        ensure!(
            output.contains("FIRN-GPU-STATE:") && output.contains("is locked already"),
            "{output}"
        );
        // Who has locked it has to unlock it.
        job.stands_still()?;
        host.node().run(&["cuda-step", "unlock", &pid])?;
        job.goes_on(3)?;

        let mut debugger = host.node().spawn(&["perl", "-e", DEBUGGER, &pid])?;
        let its_pid = wait_for("the debugger", LIMIT, || {
            Ok(host.node().read("/tmp/debugger").ok())
        })?;
        let output = fails(&job, host, "FIRN-HOLD")?;
        ensure!(output.contains("detach the debugger"), "{output}");
        host.node().run(&["kill", "-KILL", &its_pid])?;
        debugger.wait()?;
        job.checkpoint("checkpoint/job")?;
        job.goes_on(3)?;
        job.remove()?;

        let stranger = host.node().run(&["sh", "-c", STRANGER])?.stdout;
        let output = failure(Container::restore(host, "job", "checkpoint/job", 1).map(drop))?;
        ensure!(
            output.contains("FIRN-CGROUP-BUSY:") && output.contains("/default/job"),
            "{output}"
        );
        host.node().run(&["ctr", "containers", "delete", "job"])?;
        let output = failure(Container::count(host, "job", &["0"], 1, &[]).map(drop))?;
        ensure!(output.contains("cgroup is not empty"), "{output}");
        host.node().run(&["ctr", "containers", "delete", "job"])?;
        let stranger = stranger.trim();
        host.node().run(&["kill", "-KILL", stranger])?;
        wait_for("its end", LIMIT, || {
            let left = host.node().run(&["sh", "-c", MEMBERS])?.stdout;
            Ok(left.is_empty().then_some(()))
        })?;
        let (copy, _) = Container::restore(host, "job", "checkpoint/job", 1)?;
        copy.goes_on(3)?;
        copy.remove()?;
        host.idle()
    })
}

/// runc, after whose checkpoint somebody thaws the container.
const THAWING: &str = "#!/bin/sh
case \" $* \" in *' checkpoint '*) ;; *) exec /usr/sbin/runc \"$@\" ;; esac
/usr/sbin/runc \"$@\"
code=$?
root=/sys/fs/cgroup
{ echo 0 >$root/default/job/cgroup.freeze; } 2>/dev/null ||
    echo THAWED >$root/freezer/default/job/freezer.state
exit $code
";

pub fn a_container_that_somebody_thaws_has_no_image(platform: Platform) -> Result<()> {
    on([host(platform, "rf-thaw", 1)?], |[host]| {
        let job = Container::count(host, "job", &["0"], 1, &[])?;
        job.goes_on(3)?;
        host.replace_runc(THAWING)?;
        for options in [&["checkpoint"][..], &["checkpoint", "--exit"]] {
            let output = failure(job.task(&[options, &["--image-path", "/tmp/image"]].concat()))?;
            ensure!(
                output.contains("FIRN-FREEZER:") && output.contains("did not stand still"),
                "{output}"
            );
            ensure!(!host.node().path("/tmp/image").exists(), "an image is left");
            ensure!(job.status()? == "RUNNING", "it does not run");
            job.goes_on(3)?;
        }
        host.replace_runc("#!/bin/sh\nexec /usr/sbin/runc \"$@\"\n")?;
        job.checkpoint("checkpoint/job")?;
        job.goes_on(3)?;
        job.remove()?;
        host.idle()
    })
}

/// A container with a GPU whose runtime was forgotten: CRIU would fail after a standstill.
pub fn a_container_under_another_shim_is_refused(platform: Platform) -> Result<()> {
    on([host(platform, "rf-other", 1)?], |[host]| {
        let job = Container::count_with(host, "job", &["0"], 1, &["--runtime", STOCK], &[])?;
        job.goes_on(3)?;
        let (status, report) = audited(host)?;
        ensure!(
            status == "1"
                && report.contains("FIRN-RUNTIME-OTHER")
                && report.contains("containerd-shim-runc-v2"),
            "audit: {status}: {report}"
        );
        for place in ["checkpoint/job", "/tmp/job.tar", "/tmp/job.dir/"] {
            let output = failure(host.node().run(&["firn", "checkpoint", "job", place]))?;
            ensure!(output.contains("FIRN-RUNTIME-OTHER:"), "{place}: {output}");
            ensure!(job.status()? == "RUNNING", "the task is {}", job.status()?);
        }
        let output = failure(host.node().run(&["firn", "move", "job", "root@nowhere"]))?;
        ensure!(output.contains("FIRN-RUNTIME-OTHER:"), "{output}");
        let left = host.node().run(&["sh", "-c", "ls -d /tmp/job* || true"])?.stdout;
        ensure!(left.is_empty(), "there is {left}");
        job.goes_on(3)?;
        job.remove()?;
        host.idle()
    })
}

/// A node without CRIU is found out before anything is touched.
pub fn a_node_without_criu_is_refused(platform: Platform) -> Result<()> {
    on([host(platform, "rf-criu", 1)?], |[host]| {
        host.watch_runc()?;
        let labels = || Ok::<_, anyhow::Error>(host.node().run(&["firn", "labels"])?.stdout);
        ensure!(labels()?.contains("firn.dev/checkpoint=true"), "{}", labels()?);
        let job = Container::count(host, "job", &["0"], 1, &[])?;
        job.goes_on(3)?;
        host.node()
            .run(&["mv", "/usr/sbin/criu", "/usr/sbin/criu.away"])?;
        let (status, report) = audited(host)?;
        ensure!(
            status == "1" && report.contains("FIRN-CRIU-MISSING"),
            "audit: {status}: {report}"
        );
        ensure!(labels()?.contains("firn.dev/checkpoint=false"), "{}", labels()?);
        refused(&job, host, "FIRN-CRIU-MISSING")?;
        host.node()
            .run(&["mv", "/usr/sbin/criu.away", "/usr/sbin/criu"])?;
        job.checkpoint("checkpoint/job")?;
        job.remove()?;
        host.idle()
    })
}

/// Nobody would answer a copy whose filter asks.
pub fn a_seccomp_agent_is_refused(platform: Platform) -> Result<()> {
    const PROFILE: &str = r#"{"defaultAction": "SCMP_ACT_ALLOW", "listenerPath": "/run/agent.socket",
        "syscalls": [{"names": ["mknodat"], "action": "SCMP_ACT_NOTIFY"}]}"#;
    on([host(platform, "rf-agent", 1)?], |[host]| {
        host.watch_runc()?;
        let node = host.node();
        node.write("/tmp/profile.json", PROFILE)?;
        let agent = "seccompagent -socketfile /run/agent.socket >/tmp/agent.log 2>&1 & echo $!";
        let agent = node.run(&["sh", "-c", agent])?.stdout;
        wait_for("the agent", LIMIT, || {
            Ok(node.run(&["test", "-S", "/run/agent.socket"]).ok().map(drop))
        })?;
        let options = ["--seccomp", "--seccomp-profile", "/tmp/profile.json"];
        let job = Container::count_with(host, "job", &["0"], 1, &options, &[])?;
        job.goes_on(3)?;
        let (status, report) = audited(host)?;
        ensure!(
            status == "1" && report.contains("FIRN-OBJECT") && report.contains("SCMP_ACT_NOTIFY"),
            "audit: {status}: {report}"
        );
        refused(&job, host, "FIRN-OBJECT")?;
        job.remove()?;
        node.run(&["kill", agent.trim()])?;
        host.idle()
    })
}
