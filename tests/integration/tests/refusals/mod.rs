//! What cannot be checkpointed is refused with its code, and a checkpoint that fails later is rolled back:
//! the workload continues as before, and no image is left.

mod others;
mod rollback;

use std::time::Duration;

use anyhow::{Result, ensure};
use containerd_shim_protos::shim::oci::CheckpointOptions;
use firn_lab::{
    BUNDLES, Container, FIRN, GpuHost, LOG, SHARES_NOTHING, SimGpu, Skip, Task, cases, describe, failure,
    matrix, on,
};
use firn_node::{Platform, wait_for};

const LIMIT: Duration = Duration::from_secs(30);

/// Number of `parent_path` of the checkpoint options, newer than the published messages.
const PARENT_PATH: u32 = 10;

/// A node with one GPU that no other node has.
fn host(platform: Platform, name: &str, gpu: u32) -> Result<GpuHost> {
    GpuHost::for_test(platform, name, &[SimGpu::h200(gpu)])
}

/// A checkpoint of a running counter fails with this code, leaves no image, and the counter continues.
/// Returns the error.
fn fails(job: &Container<'_>, host: &GpuHost, code: &str) -> Result<String> {
    let output = failure(job.checkpoint("checkpoint/failed"))?;
    ensure!(output.contains(&format!("{code}:")), "not {code} but:\n{output}");
    ensure!(output.contains("hint: "), "no hint in:\n{output}");
    ensure!(!host.has_image("checkpoint/failed")?, "there is an image");
    ensure!(job.status()? == "RUNNING", "the task is {}", job.status()?);
    job.goes_on(3)?;
    Ok(output)
}

/// As [`fails`], before anything was touched, running and paused; `host` watches runc.
fn refused(job: &Container<'_>, host: &GpuHost, code: &str) -> Result<String> {
    let output = fails(job, host, code)?;
    let node = host.node();
    node.write("/tmp/kept/before", "of somebody else\n")?;
    job.task(&["pause"])?;
    let paused = failure(job.task(&["checkpoint", "--image-path", "/tmp/kept"]))?;
    ensure!(paused.contains(&format!("{code}:")), "{paused}");
    ensure!(job.status()? == "PAUSED", "the task is {}", job.status()?);
    job.stands_still()?;
    let left = node.run(&["ls", "-A", "/tmp/kept"])?.stdout;
    ensure!(left == "before\n", "the image directory holds {left}");
    job.task(&["resume"])?;
    job.goes_on(3)?;
    ensure!(!host.runc_has("checkpoint")?, "runc was called");
    Ok(output)
}

fn managed_memory_is_refused(platform: Platform) -> Result<()> {
    on([host(platform, "rf-uvm", 1)?], |[host]| {
        host.watch_runc()?;
        let job = Container::count(host, "job", &["0"], 1, &["--managed"])?;
        job.goes_on(3)?;
        let (status, report) = audited(host)?;
        ensure!(
            status == "1" && report.contains("FIRN-UVM"),
            "audit: {status}: {report}"
        );
        refused(&job, host, "FIRN-UVM")?;
        job.remove()?;
        host.idle()
    })
}

/// What `firn audit` reports for the container: its exit status and JSON.
fn audited(host: &GpuHost) -> Result<(String, String)> {
    let (status, report) = host.firn_shows(&["audit", "job"])?;
    let status = status.map(|status| status.to_string()).unwrap_or_default();
    Ok((status, format!("{report:#}")))
}

fn audit_reports_a_checkpointable_container_untouched(platform: Platform) -> Result<()> {
    on([host(platform, "rf-audit", 1)?], |[host]| {
        host.watch_runc()?;
        let job = Container::count(host, "job", &["0"], 1, &[])?;
        job.goes_on(3)?;
        let (status, report) = audited(host)?;
        ensure!(status == "0", "status {status}: {report}");
        ensure!(report.contains(&host.uuids()[0]), "no GPU in {report}");
        ensure!(report.contains(r#""cuda": true"#), "no CUDA process in {report}");
        job.task(&["pause"])?;
        let (status, report) = audited(host)?;
        ensure!(status == "0", "paused: status {status}: {report}");
        ensure!(job.status()? == "PAUSED", "the task is {}", job.status()?);
        job.task(&["resume"])?;
        job.goes_on(3)?;
        ensure!(!host.runc_has("checkpoint")?, "runc was called");
        job.checkpoint("checkpoint/job")?;
        job.remove()?;
        host.idle()
    })
}

/// What CRIU cannot dump is seen before anything is touched, and the same program continues.
fn undumpable(platform: Platform, name: &str, habit: &str, code: &str) -> Result<()> {
    on([host(platform, name, 1)?], |[host]| {
        host.watch_runc()?;
        let job = Container::count(host, "job", &["0"], 1, &[habit])?;
        job.goes_on(3)?;
        let (status, report) = audited(host)?;
        ensure!(
            status == "1" && report.contains(code),
            "audit: {status}: {report}"
        );
        let output = refused(&job, host, code)?;
        ensure!(output.contains("(gpu-counter)"), "no process in:\n{output}");
        job.remove()?;
        host.idle()
    })
}

fn an_io_uring_is_refused(platform: Platform) -> Result<()> {
    undumpable(platform, "rf-ring", "--io-uring", "FIRN-IO-URING")
}

/// Where the CPU has no keys, no program has memory with one.
fn memory_with_a_protection_key_is_refused(platform: Platform) -> Result<()> {
    let smaps = std::fs::read_to_string("/proc/self/smaps")?;
    if !smaps.contains("ProtectionKey:") {
        return Err(Skip::new("this CPU has no protection keys").into());
    }
    undumpable(platform, "rf-key", "--protection-key", "FIRN-PROTECTION-KEY")?;
    // CRIU loses it without a word.
    on([host(platform, "rf-key-plain", 1)?], |[host]| {
        let words = ["objects", "protection-key", "/object", "/log"];
        let job = Container::run(host, "job", &["--runtime", FIRN], &words)?;
        wait_for("the key", LIMIT, || {
            let (_, report) = audited(host)?;
            Ok(report.contains("FIRN-PROTECTION-KEY").then_some(()))
        })?;
        job.checkpoint("checkpoint/job")?;
        job.remove()?;
        let (copy, _) = Container::restore(host, "job", "checkpoint/job", 0)?;
        wait_for("the copy to miss its key", LIMIT, || {
            let log = copy.exec(&["tail", "-n", "1", "/log"])?;
            Ok(log.contains("it is not there any more").then_some(()))
        })?;
        copy.remove()?;
        host.remove_image("checkpoint/job")?;
        host.idle()
    })
}

/// One process opens the memory of another: nothing shows that from outside.
fn importing<'h>(host: &'h GpuHost, options: &[&str]) -> Result<Container<'h>> {
    let job = Container::count_with(host, "job", &["0"], 1, options, &["--ipc"])?;
    job.goes_on(3)?;
    wait_for("the importer", LIMIT, || Ok((imported(host)? > 0).then_some(())))?;
    Ok(job)
}

/// How often the importer has read the memory of the other.
fn imported(host: &GpuHost) -> Result<usize> {
    let log = host.node().read(format!("{BUNDLES}/job/rootfs{LOG}"))?;
    Ok(log.lines().filter(|line| line.starts_with("importer ")).count())
}

fn an_incremental_checkpoint_is_refused(platform: Platform) -> Result<()> {
    on([host(platform, "rf-parent", 1)?], |[host]| {
        host.watch_runc()?;
        let job = Container::count(host, "job", &["0"], 1, &[])?;
        job.goes_on(2)?;
        let mut options = CheckpointOptions::new();
        let unknown = options.special_fields.mut_unknown_fields();
        unknown.add_length_delimited(PARENT_PATH, b"../before".to_vec());
        let task = Task::of(host, "job")?;
        let output = describe(&task.end(task.checkpoint("/tmp/image", &options)?), |_| {
            "success".to_owned()
        });
        ensure!(
            output.contains("FIRN-PARENT:") && output.contains("../before"),
            "{output}"
        );
        ensure!(!host.node().path("/tmp/image").exists(), "there is an image");
        ensure!(!host.runc_has("checkpoint")?, "runc was called");
        job.goes_on(2)?;
        job.remove()?;
        host.idle()
    })
}

fn processes_that_share_memory_are_refused_and_go_on(platform: Platform) -> Result<()> {
    on(
        [GpuHost::for_test(platform, "rf-ipc", &[SimGpu::h200(1)])?],
        |[host]| {
            host.watch_runc()?;
            let job = importing(host, &[])?;
            let output = refused(&job, host, "FIRN-IPC")?;
            ensure!(output.contains("firn.dev/ipc=none"), "no remedy in:\n{output}");
            for pid in job.pids()? {
                ensure!(
                    output.contains(&format!("{pid} (gpu-counter)")),
                    "no {pid} in:\n{output}"
                );
            }
            let before = imported(host)?;
            wait_for("the importer to continue", LIMIT, || {
                Ok((imported(host)? > before + 2).then_some(()))
            })?;
            job.remove()?;
            host.idle()
        },
    )
}

/// Two CUDA processes that have a library loaded under NCCL's name.
fn ranks<'h>(host: &'h GpuHost, settings: &str) -> Result<Container<'h>> {
    let script = format!(
        "cp $(find / -xdev -name libgcc_s.so.1 | head -n 1) /tmp/libnccl.so.2; \
         export LD_PRELOAD=/tmp/libnccl.so.2 {settings}; \
         exec gpu-counter --out /counter.log --interval-ms 50 --mib 8 --procs 2"
    );
    let job = Container::script(host, "job", &["0"], 2, &[], &script)?;
    job.goes_on(3)?;
    Ok(job)
}

fn nccl_ranks_are_refused_unless_they_use_sockets(platform: Platform) -> Result<()> {
    on([host(platform, "rf-nccl", 1)?], |[host]| {
        host.watch_runc()?;
        let job = ranks(host, "NCCL_P2P_DISABLE=1")?;
        let output = refused(&job, host, "FIRN-NCCL")?;
        ensure!(output.contains("NCCL_SHM_DISABLE=1"), "no remedy in:\n{output}");
        job.remove()?;

        let job = ranks(host, "NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_NVLS_ENABLE=0")?;
        job.checkpoint("checkpoint/job")?;
        job.goes_on(3)?;
        job.remove()?;
        host.idle()
    })
}

fn undeclared_shared_memory_leaves_the_container_suspended(platform: Platform) -> Result<()> {
    on([host(platform, "rf-ipcl", 1)?], |[host]| {
        let job = importing(host, &SHARES_NOTHING)?;
        let output = failure(job.task(&["checkpoint", "--image-path", "/tmp/image"]))?;
        ensure!(
            output.contains("FIRN-GPU-SUSPENDED:") && output.contains("CUDA_ERROR_INVALID_VALUE"),
            "{output}"
        );
        ensure!(output.contains("/tmp/image is complete"), "{output}");
        job.stands_still()?;
        job.remove()?;
        host.idle()
    })
}

fn a_cuda_process_started_by_exec_is_refused(platform: Platform) -> Result<()> {
    on([host(platform, "rf-exec", 1)?], |[host]| {
        let job = Container::count(host, "job", &["0"], 1, &[])?;
        job.goes_on(3)?;
        let exec = ["tasks", "exec", "--detach", "--exec-id", "second", "job"];
        let counter = [
            "/bin/gpu-counter",
            "--mib",
            "8",
            "--out",
            "/second.log",
            "--interval-ms",
            "50",
        ];
        host.node().run(&[&["ctr"], &exec[..], &counter].concat())?;
        let log = host.node().path(format!("{BUNDLES}/job/rootfs/second.log"));
        wait_for("the second counter", LIMIT, || Ok(log.exists().then_some(())))?;
        fails(&job, host, "FIRN-EXEC")?;
        host.node().run(&[
            "ctr",
            "tasks",
            "kill",
            "--exec-id",
            "second",
            "--signal",
            "SIGKILL",
            "job",
        ])?;
        wait_for("its end", LIMIT, || Ok((job.pids()?.len() == 1).then_some(())))?;
        job.checkpoint("checkpoint/job")?;
        job.goes_on(3)?;
        job.remove()?;
        host.idle()
    })
}

/// Starts a sleep by exec in the container, and waits until it sleeps.
fn exec_sleep(job: &Container<'_>, host: &GpuHost) -> Result<()> {
    let exec = ["ctr", "tasks", "exec", "--detach", "--exec-id", "shell", job.id()];
    host.node().run(&[&exec[..], &["sleep", "1000"]].concat())?;
    wait_for("the exec to sleep", LIMIT, || {
        let processes = host.node().processes();
        let mut sleeping = processes.iter().filter(|process| process.command == "sleep");
        Ok(sleeping.next().map(drop))
    })
}

fn exec_processes_are_refused_or_left_out_as_annotated(platform: Platform) -> Result<()> {
    on([host(platform, "rf-omit", 1)?], |[host]| {
        host.watch_runc()?;
        let job = Container::count(host, "job", &["0"], 1, &[])?;
        job.goes_on(3)?;
        exec_sleep(&job, host)?;
        let output = refused(&job, host, "FIRN-EXEC")?;
        ensure!(
            output.contains("(sleep)") && output.contains("firn.dev/exec=omit"),
            "{output}"
        );
        ensure!(job.pids()?.len() == 2, "{:?}", job.pids()?);

        host.configure("[checkpoint]\nexec = \"omit\"\n")?;
        job.checkpoint("checkpoint/job")?;
        job.goes_on(3)?;
        ensure!(job.pids()?.len() == 2, "the exec has ended: {:?}", job.pids()?);
        ensure!(
            host.log().contains("leaves out process"),
            "the log does not show it"
        );
        job.remove()?;
        host.idle()?;

        let (copy, _) = Container::restore(host, "job", "checkpoint/job", 1)?;
        copy.goes_on(3)?;
        ensure!(copy.pids()?.len() == 1, "{:?}", copy.pids()?);
        copy.remove()?;

        let strict = ["--annotation", "firn.dev/exec=refuse"];
        let job = Container::count_with(host, "job", &["0"], 1, &strict, &[])?;
        job.goes_on(3)?;
        exec_sleep(&job, host)?;
        fails(&job, host, "FIRN-EXEC")?;
        job.remove()?;
        host.idle()
    })
}

fn gpu_memory_above_the_containers_limit_is_refused(platform: Platform) -> Result<()> {
    on([host(platform, "rf-room", 1)?], |[host]| {
        host.watch_runc()?;
        let limit = ["--memory-limit", "100663296"];
        let arguments = ["--reserve-mib", "200"];
        let job = Container::count_with(host, "job", &["0"], 1, &limit, &arguments)?;
        job.goes_on(3)?;
        let (status, report) = audited(host)?;
        ensure!(
            status == "1" && report.contains("FIRN-HOST-MEMORY") && report.contains("/default/job leaves 9"),
            "audit: {status}: {report}"
        );
        let output = refused(&job, host, "FIRN-HOST-MEMORY")?;
        ensure!(output.contains("/default/job leaves 9"), "{output}");
        job.remove()?;

        let enough = ["--memory-limit", "536870912"];
        let job = Container::count_with(host, "job", &["0"], 1, &enough, &arguments)?;
        job.goes_on(3)?;
        let (status, report) = audited(host)?;
        ensure!(status == "0", "audit: {status}: {report}");
        // A limit above the container's, as a pod has it.
        let limit = |v1: &str, v2: &str| {
            let script = "for dir in $(find /sys/fs/cgroup -path '*/default/job' -name job); do \
                          test ! -e $dir/../memory.limit_in_bytes || \
                          echo $0 > $dir/../memory.limit_in_bytes; \
                          test ! -e $dir/../memory.max || echo $1 > $dir/../memory.max; done";
            host.node().run(&["sh", "-ec", script, v1, v2])
        };
        limit("100663296", "100663296")?;
        let (status, report) = audited(host)?;
        ensure!(
            status == "1" && report.contains("/default leaves 9"),
            "audit: {status}: {report}"
        );
        let output = refused(&job, host, "FIRN-HOST-MEMORY")?;
        ensure!(output.contains("/default leaves 9"), "{output}");
        limit("-1", "max")?;
        job.checkpoint("checkpoint/job")?;
        job.goes_on(3)?;
        job.remove()?;
        host.idle()
    })
}

/// A part of a file system whose whole the container does not have, as a hook binds it into a container from
/// outside.
const MOUNT_BEHIND: &str = "mkdir /whole /foreign && mount -t tmpfs whole /whole && mkdir /whole/part && \
     mount --bind /whole/part /foreign && umount -l /whole";

fn a_mount_made_behind_the_runtime_is_refused_and_named(platform: Platform) -> Result<()> {
    on([host(platform, "rf-mount", 1)?], |[host]| {
        host.watch_runc()?;
        let script = "mount -t tmpfs mine /tmp; exec gpu-counter --out /counter.log --interval-ms 50 --mib 8";
        let job = Container::script(host, "job", &["0"], 1, &["--privileged"], script)?;
        job.goes_on(3)?;
        // What the container has mounted itself is its own.
        job.checkpoint("checkpoint/before")?;
        job.goes_on(3)?;

        let namespace = format!("--mount=/proc/{}/ns/mnt", job.pid()?);
        host.node()
            .run(&["nsenter", &namespace, "sh", "-ec", MOUNT_BEHIND])?;
        let (status, report) = audited(host)?;
        ensure!(
            status == "1" && report.contains("FIRN-FOREIGN-MOUNT") && !report.contains("FIRN-STDIO"),
            "audit: {status}: {report}"
        );
        let output = fails(&job, host, "FIRN-FOREIGN-MOUNT")?;
        ensure!(
            output.contains("/foreign is a mount of /part of a tmpfs"),
            "{output}"
        );
        job.remove()?;
        host.idle()
    })
}

fn a_stdio_file_of_the_host_is_refused_and_named(platform: Platform) -> Result<()> {
    on([host(platform, "rf-stdio", 1)?], |[host]| {
        host.watch_runc()?;
        host.node().write("/tmp/outside", "text\n")?;
        let bind = "type=bind,src=/proc,dst=/hosts,options=rbind";
        let options = ["--privileged", "--mount", bind];
        let script =
            "exec gpu-counter --out /counter.log --interval-ms 50 --mib 8 </hosts/1/root/tmp/outside";
        let job = Container::script(host, "job", &["0"], 1, &options, script)?;
        job.goes_on(3)?;
        let (status, report) = audited(host)?;
        ensure!(
            status == "1" && report.contains("FIRN-STDIO") && !report.contains("FIRN-FOREIGN-MOUNT"),
            "audit: {status}: {report}"
        );
        let output = refused(&job, host, "FIRN-STDIO")?;
        ensure!(
            output.contains("/tmp/outside") && output.contains("(gpu-counter)"),
            "{output}"
        );
        job.remove()?;
        host.idle()
    })
}

/// A process that has the pipe of an MPS daemon open, then a driver whose library has lost one of the
/// checkpoint calls: that in the container is the one that it was started with.
fn mps_and_an_old_driver_are_refused(platform: Platform) -> Result<()> {
    on(
        [GpuHost::for_test(platform, "rf-setup", &[SimGpu::h200(1)])?],
        |[host]| {
            host.watch_runc()?;
            let script = "mkdir -p /tmp/nvidia-mps; mkfifo /tmp/nvidia-mps/control; \
                          exec 9<>/tmp/nvidia-mps/control; \
                      exec gpu-counter --out /counter.log --interval-ms 50 --mib 8";
            let job = Container::script(host, "job", &["0"], 1, &[], script)?;
            job.goes_on(3)?;
            let output = refused(&job, host, "FIRN-MPS")?;
            ensure!(output.contains("/tmp/nvidia-mps"), "{output}");
            job.remove()?;

            let job = Container::count(host, "job", &["0"], 1, &[])?;
            job.goes_on(3)?;
            let rename = "sed -i --follow-symlinks s/cuCheckpointProcessLock/cuCheckpointProcessL0ck/g \
                          $(find /usr/lib -name libcuda.so.1)";
            host.node().run(&["sh", "-ec", rename])?;
            refused(&job, host, "FIRN-DRIVER-TOO-OLD")?;
            job.remove()?;
            host.idle()
        },
    )
}

fn a_gpu_in_mig_mode_is_refused(platform: Platform) -> Result<()> {
    on(
        [GpuHost::for_test(platform, "rf-mig", &[SimGpu::h200(1).mig()])?],
        |[host]| {
            host.watch_runc()?;
            let job = Container::count(host, "job", &["0"], 1, &[])?;
            job.goes_on(3)?;
            let output = refused(&job, host, "FIRN-GPU-MIG")?;
            ensure!(output.contains(&host.uuids()[0]), "{output}");
            job.remove()?;
            host.idle()
        },
    )
}

pub(crate) fn suite() -> matrix::Suite {
    matrix::Suite::new(&cases! {
        managed_memory_is_refused [FORKY, TRIXIE];
        audit_reports_a_checkpointable_container_untouched [FORKY];
        an_io_uring_is_refused [FORKY];
        memory_with_a_protection_key_is_refused [FORKY];
        an_incremental_checkpoint_is_refused [FORKY];
        processes_that_share_memory_are_refused_and_go_on [FORKY_V2, TRIXIE];
        nccl_ranks_are_refused_unless_they_use_sockets [FORKY];
        undeclared_shared_memory_leaves_the_container_suspended [FORKY];
        a_cuda_process_started_by_exec_is_refused [FORKY];
        exec_processes_are_refused_or_left_out_as_annotated [FORKY];
        gpu_memory_above_the_containers_limit_is_refused [FORKY];
        a_mount_made_behind_the_runtime_is_refused_and_named [FORKY];
        a_stdio_file_of_the_host_is_refused_and_named [FORKY];
        mps_and_an_old_driver_are_refused [FORKY_V2, TRIXIE];
        a_gpu_in_mig_mode_is_refused [FORKY_V2];
        others::changes_by_others_are_named_and_cost_nothing [FORKY];
        others::a_process_on_two_gpus_is_refused_unless_its_owner_knows_of_no_access [FORKY];
        others::what_the_driver_has_refused_once_is_refused_by_that_reason [FORKY];
        others::a_container_that_somebody_thaws_has_no_image [FORKY_V2, TRIXIE];
        others::a_container_under_another_shim_is_refused [FORKY, TRIXIE];
        others::a_node_without_criu_is_refused [FORKY];
        others::a_seccomp_agent_is_refused [FORKY];
        rollback::a_driver_that_fails_a_checkpoint_costs_nothing [FORKY, TRIXIE];
        rollback::a_file_that_outgrows_the_clients_copy_is_named [FORKY, FORKY_V2, TRIXIE];
        rollback::when_one_of_four_processes_fails_all_four_go_on [FORKY];
        rollback::a_failed_gpu_restore_is_tried_again [FORKY];
        rollback::a_copy_whose_caller_ends_costs_nothing [FORKY, TRIXIE];
        rollback::a_suspended_container_goes_on_when_it_is_resumed [FORKY_V2, TRIXIE];
        rollback::a_suspended_container_can_be_ended [FORKY_V2, TRIXIE];
        rollback::after_a_failed_dump_the_counter_goes_on_or_stays_paused [FORKY, TRIXIE];
        rollback::a_full_disk_costs_nothing_and_leaves_no_partial_image [FORKY];
        rollback::a_disk_that_fails_at_write_back_ends_nothing [FORKY];
    })
}
