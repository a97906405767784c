//! The simulated driver behaves with CRIU as a real one does. Everything here runs with containerd's own
//! shim: what firn does is done by hand, step by step, and left out to see what breaks.

use anyhow::{Result, ensure};
use firn_lab::{Container, GpuHost, IMAGE, STOCK, SimGpu, cases, matrix, on};
use firn_node::Platform;

fn host(platform: Platform, name: &str, gpus: &[SimGpu]) -> Result<GpuHost> {
    GpuHost::for_test(platform, name, gpus)
}

/// A counter under containerd's own shim.
fn count<'h>(host: &'h GpuHost, gpus: &[&str], counters: usize, arguments: &[&str]) -> Result<Container<'h>> {
    Container::count_with(host, "job", gpus, counters, &["--runtime", STOCK], arguments)
}

/// The driver's calls, made by hand on all of these processes. What they answered.
fn step(host: &GpuHost, calls: &str, pids: &[String], pairs: &[(&SimGpu, &SimGpu)]) -> Result<String> {
    let pairs: Vec<String> = pairs
        .iter()
        .map(|(old, new)| format!("--pair={}={}", old.uuid, new.uuid))
        .collect();
    let mut argv = vec!["cuda-step", calls];
    argv.extend(pids.iter().chain(&pairs).map(String::as_str));
    let output = host.output_of(&argv, "")?;
    Ok(format!("{}{}", output.stdout, output.stderr))
}

/// As [`step`]; all calls succeed.
fn succeed(host: &GpuHost, calls: &str, pids: &[String], pairs: &[(&SimGpu, &SimGpu)]) -> Result<()> {
    let output = step(host, calls, pids, pairs)?;
    let expected = calls.split(',').count() * pids.len();
    ensure!(
        output.matches("CUDA_SUCCESS").count() == expected,
        "{calls}:\n{output}"
    );
    Ok(())
}

/// As [`step`]; fails with this result.
fn fail(
    host: &GpuHost,
    calls: &str,
    pids: &[String],
    pairs: &[(&SimGpu, &SimGpu)],
    result: &str,
) -> Result<()> {
    let output = step(host, calls, pids, pairs)?;
    ensure!(output.contains(result), "{calls}: not {result} but\n{output}");
    Ok(())
}

/// CRIU dumps a process with open devices only when the driver has taken its state, and the process continues
/// after both.
fn criu_dumps_only_processes_the_driver_has_checkpointed(platform: Platform) -> Result<()> {
    on([host(platform, "fd-dump", &[SimGpu::h200(1)])?], |[host]| {
        let job = count(host, &["0"], 1, &[])?;
        job.goes_on(3)?;
        let output = host.ctr(
            &["containers", "checkpoint", "--task", "job", "checkpoint/none"],
            "",
        )?;
        assert_ne!(output.code, Some(0), "CRIU has dumped a process that holds a GPU");
        assert!(output.stderr.contains("criu failed"), "{output}");
        job.goes_on(3)?;

        let pids = job.pids()?;
        succeed(host, "lock,checkpoint", &pids, &[])?;
        assert_eq!(host.gpu_memory()?, [0]);
        job.stands_still()?;
        job.checkpoint("checkpoint/job")?;
        job.stands_still()?;
        succeed(host, "restore,unlock", &pids, &[])?;
        job.goes_on(3)?;
        job.remove()?;
        host.idle()
    })
}

/// On another node the driver gives the state back only with this node's devices in `/dev` and in the device
/// cgroup.
fn gpu_restore_needs_the_device_node_and_its_cgroup_rule(platform: Platform) -> Result<()> {
    let (old, new) = (SimGpu::h200(1), SimGpu::h200(2));
    let hosts = [
        host(platform, "fd-node-a", std::slice::from_ref(&old))?,
        host(platform, "fd-node-b", std::slice::from_ref(&new))?,
    ];
    on(hosts, |[a, b]| {
        b.needs_device_rules()?;
        let job = count(a, &["0"], 1, &[])?;
        job.goes_on(3)?;
        succeed(a, "lock,checkpoint", &job.pids()?, &[])?;
        job.checkpoint("checkpoint/job")?;
        job.remove()?;
        a.send_image("checkpoint/job", b)?;

        let (copy, _) = Container::restore(b, "job", "checkpoint/job", 1)?;
        let (pids, pair) = (copy.pids()?, [(&old, &new)]);
        copy.stands_still()?;
        fail(b, "restore", &pids, &pair, "CUDA_ERROR_INVALID_VALUE")?;

        let pid = copy.pid()?;
        let nodes = format!(
            "cd /proc/{pid}/root/dev; for node in nvidiactl nvidia-uvm nvidia0; do
               rm -f $node; \
               mknod $node b $((0x$(stat -c %t /dev/$node))) $((0x$(stat -c %T /dev/$node))); done"
        );
        b.node().run(&["sh", "-ec", &nodes])?;
        fail(b, "restore", &pids, &pair, "CUDA_ERROR_INVALID_VALUE")?;
        fail(b, "unlock", &pids, &[], "CUDA_ERROR_ILLEGAL_STATE")?;

        let rules = "for node in nvidiactl nvidia-uvm nvidia0; do
               echo \"b $((0x$(stat -c %t /dev/$node))):$((0x$(stat -c %T /dev/$node))) rwm\" \
               >/sys/fs/cgroup/devices/default/job/devices.allow; done";
        b.node().run(&["sh", "-ec", rules])?;
        succeed(b, "restore,unlock", &pids, &pair)?;
        copy.goes_on(3)?;
        assert_eq!(copy.gpus_in_use()?, b.uuids());
        copy.remove()?;
        b.idle()
    })
}

fn checkpointed_gpu_memory_is_free_for_others(platform: Platform) -> Result<()> {
    on(
        [host(platform, "fd-mem", &[SimGpu::h200(1).memory(64)])?],
        |[host]| {
            let job = count(host, &["0"], 1, &["--mib", "40"])?;
            job.goes_on(3)?;
            let options = host.ctr_gpu_options(&["0"])?;
            let options: Vec<&str> = options.iter().map(String::as_str).collect();
            let other = [
                "/bin/gpu-counter",
                "--mib",
                "40",
                "--iterations",
                "3",
                "--interval-ms",
                "50",
            ];
            let run = [
                &["run", "--rm"],
                host.limits(),
                &options,
                &[IMAGE, "other"],
                &other,
            ]
            .concat();
            let output = host.ctr(&run, "")?;
            assert!(
                output.code == Some(1) && output.stderr.contains("OUT_OF_MEMORY"),
                "{output}"
            );

            succeed(host, "lock,checkpoint", &job.pids()?, &[])?;
            let output = host.ctr(&run, "")?;
            assert_eq!(output.code, Some(0), "{output}");

            succeed(host, "restore,unlock", &job.pids()?, &[])?;
            // Every element is verified: nothing of the other's is in the job's memory.
            job.goes_on(3)?;

            succeed(host, "lock,checkpoint", &job.pids()?, &[])?;
            let options = [&["--runtime", STOCK], &options[..]].concat();
            let other = Container::run(host, "other", &options, &["/bin/gpu-counter", "--mib", "40"])?;
            firn_node::wait_for("memory of the other", std::time::Duration::from_secs(20), || {
                Ok((host.gpu_memory()? >= vec![40]).then_some(()))
            })?;
            fail(host, "restore", &job.pids()?, &[], "CUDA_ERROR_OUT_OF_MEMORY")?;
            other.remove()?;
            // As the driver does it: the failed restore has spoilt the state.
            fail(host, "restore", &job.pids()?, &[], "CUDA_ERROR_OPERATING_SYSTEM")?;
            job.remove()?;
            host.idle()
        },
    )
}

fn gpu_memory_ends_with_its_process(platform: Platform) -> Result<()> {
    on([host(platform, "fd-lost", &[SimGpu::h200(1)])?], |[host]| {
        let job = count(host, &["0"], 1, &[])?;
        job.goes_on(3)?;
        succeed(host, "lock,checkpoint", &job.pids()?, &[])?;
        job.checkpoint("checkpoint/job")?;
        job.remove()?;
        assert_eq!(host.gpu_memory()?, [0]);

        let (copy, _) = Container::restore(host, "job", "checkpoint/job", 1)?;
        // The copy's memory is in its image, not on the GPU: without the driver it has none and cannot
        // continue.
        assert_eq!(host.gpu_memory()?, [0]);
        copy.stands_still()?;
        fail(host, "unlock", &copy.pids()?, &[], "CUDA_ERROR_ILLEGAL_STATE")?;
        copy.stands_still()?;
        succeed(host, "restore,unlock", &copy.pids()?, &[])?;
        copy.goes_on(3)?;
        copy.remove()?;
        host.idle()
    })
}

fn the_driver_refuses_managed_memory_and_the_process_goes_on(platform: Platform) -> Result<()> {
    on([host(platform, "fd-uvm", &[SimGpu::h200(1)])?], |[host]| {
        let job = count(host, &["0"], 1, &["--managed"])?;
        job.goes_on(3)?;
        fail(
            host,
            "lock,checkpoint",
            &job.pids()?,
            &[],
            "CUDA_ERROR_NOT_SUPPORTED",
        )?;
        job.stands_still()?;
        succeed(host, "unlock", &job.pids()?, &[])?;
        job.goes_on(3)?;
        // It has been refused once.
        fail(host, "lock,checkpoint", &job.pids()?, &[], "CUDA_ERROR_UNKNOWN")?;
        succeed(host, "unlock", &job.pids()?, &[])?;
        job.goes_on(3)?;
        job.remove()?;
        host.idle()
    })
}

fn ipc_memory_is_checkpointed_and_cannot_be_restored(platform: Platform) -> Result<()> {
    on([host(platform, "fd-ipc", &[SimGpu::h200(1)])?], |[host]| {
        let job = count(host, &["0"], 1, &["--ipc"])?;
        job.goes_on(3)?;
        firn_node::wait_for("the importer", std::time::Duration::from_secs(20), || {
            let log = host
                .node()
                .read(format!("{}/job/rootfs{}", firn_lab::BUNDLES, firn_lab::LOG))?;
            Ok(log.contains("importer").then_some(()))
        })?;
        let pids = job.pids()?;
        ensure!(pids.len() == 2, "{pids:?} are not two processes");
        succeed(host, "lock,checkpoint", &pids, &[])?;
        fail(host, "restore", &pids, &[], "CUDA_ERROR_INVALID_VALUE")?;
        job.remove()?;
        host.idle()
    })
}

fn every_visible_gpu_needs_a_pair_in_the_map(platform: Platform) -> Result<()> {
    let gpus = [SimGpu::h200(1), SimGpu::h200(2)];
    on([host(platform, "fd-pair", &gpus)?], |[host]| {
        let [one, two] = &gpus;
        let job = count(host, &["0", "1"], 1, &[])?;
        job.goes_on(3)?;
        assert_eq!(job.gpus_in_use()?, [&*one.uuid]);
        let pids = job.pids()?;
        succeed(host, "lock,checkpoint", &pids, &[])?;
        fail(host, "restore", &pids, &[(one, two)], "CUDA_ERROR_NOT_SUPPORTED")?;
        succeed(host, "restore,unlock", &pids, &[(one, two), (two, one)])?;
        job.goes_on(3)?;
        assert_eq!(job.gpus_in_use()?, [&*two.uuid]);
        job.remove()?;
        host.idle()
    })
}

/// Gives a running container the nodes and the device rules of these GPUs alone.
fn give(job: &Container<'_>, host: &GpuHost, gpus: &[usize]) -> Result<()> {
    let pid = job.pid()?;
    let script = format!(
        "rules=/sys/fs/cgroup/devices/default/job; cd /proc/{pid}/root/dev
         rule() {{ echo \"b $((0x$(stat -c %t /dev/$1))):$((0x$(stat -c %T /dev/$1))) rwm\"; }}
         for node in nvidia0 nvidia1; do rm -f $node; rule $node >$rules/devices.deny; done
         for node; do
           mknod -m 666 $node b $((0x$(stat -c %t /dev/$node))) $((0x$(stat -c %T /dev/$node)))
           rule $node >$rules/devices.allow
         done"
    );
    let nodes: Vec<String> = gpus.iter().map(|gpu| format!("nvidia{gpu}")).collect();
    let mut argv = vec!["sh", "-ec", &script, "sh"];
    argv.extend(nodes.iter().map(String::as_str));
    host.node().run(&argv)?;
    Ok(())
}

/// Without CRIU a process moves to the GPU that the device rules of its container allow from then on.
fn a_running_process_follows_the_device_rules_to_other_gpus(platform: Platform) -> Result<()> {
    let gpus = [SimGpu::h200(1), SimGpu::h200(2)];
    on([host(platform, "fd-live", &gpus)?], |[host]| {
        host.needs_device_rules()?;
        let job = count(host, &["0"], 1, &[])?;
        job.goes_on(3)?;
        let (pid, pids) = (job.pid()?, job.pids()?);
        for (old, new) in [(0, 1), (1, 0), (0, 1), (1, 0)] {
            let pair = [(&gpus[old], &gpus[new])];
            succeed(host, "lock,checkpoint", &pids, &[])?;
            for _ in 0..2 {
                fail(host, "restore", &pids, &pair, "CUDA_ERROR_INVALID_VALUE")?;
            }
            give(&job, host, &[new])?;
            succeed(host, "restore,unlock", &pids, &pair)?;
            job.goes_on(3)?;
            assert_eq!(job.gpus_in_use()?, [&*gpus[new].uuid]);
        }
        assert_eq!(job.pid()?, pid, "another process continues");
        job.remove()?;
        host.idle()
    })
}

/// A process that could open more GPUs than it was given wants pairs for all of them, also when it no longer
/// can.
fn device_rules_that_allow_too_much_spoil_the_next_move(platform: Platform) -> Result<()> {
    let gpus = [SimGpu::h200(1), SimGpu::h200(2)];
    on([host(platform, "fd-wide", &gpus)?], |[host]| {
        host.needs_device_rules()?;
        let [one, two] = &gpus;
        let job = count(host, &["0"], 1, &[])?;
        job.goes_on(3)?;
        let pids = job.pids()?;
        succeed(host, "lock,checkpoint", &pids, &[])?;
        give(&job, host, &[0, 1])?;
        succeed(host, "restore,unlock", &pids, &[(one, two)])?;
        job.goes_on(3)?;
        assert_eq!(job.gpus_in_use()?, [&*two.uuid]);

        succeed(host, "lock,checkpoint", &pids, &[])?;
        fail(host, "restore", &pids, &[(two, one)], "CUDA_ERROR_INVALID_VALUE")?;
        give(&job, host, &[0])?;
        fail(host, "restore", &pids, &[(two, one)], "CUDA_ERROR_INVALID_VALUE")?;
        give(&job, host, &[0, 1])?;
        succeed(host, "restore,unlock", &pids, &[(two, one), (one, two)])?;
        job.goes_on(3)?;
        assert_eq!(job.gpus_in_use()?, [&*one.uuid]);
        job.remove()?;
        host.idle()
    })
}

pub(crate) fn suite() -> matrix::Suite {
    matrix::Suite::new(&cases! {
        criu_dumps_only_processes_the_driver_has_checkpointed [FORKY, TRIXIE];
        gpu_restore_needs_the_device_node_and_its_cgroup_rule [FORKY, TRIXIE];
        checkpointed_gpu_memory_is_free_for_others [FORKY];
        gpu_memory_ends_with_its_process [FORKY];
        the_driver_refuses_managed_memory_and_the_process_goes_on [FORKY];
        ipc_memory_is_checkpointed_and_cannot_be_restored [FORKY];
        every_visible_gpu_needs_a_pair_in_the_map [FORKY];
        a_running_process_follows_the_device_rules_to_other_gpus [FORKY];
        device_rules_that_allow_too_much_spoil_the_next_move [FORKY];
    })
}
