//! Which GPUs a restore takes, by policy and by the NVLinks between them: on a node whose GPUs are joined
//! otherwise than those of the source.

use anyhow::{Context, Result, ensure};
use firn_lab::{Container, GpuHost, SimGpu, cases, failure, matrix, nothing_left, on};
use firn_node::Platform;

/// A node with four GPUs that no other node has, joined in pairs.
fn host(platform: Platform, name: &str, first: u32, nvlinks: &[&str]) -> Result<GpuHost> {
    let gpus: Vec<SimGpu> = (first..first + 4).map(SimGpu::h200).collect();
    let mut host = GpuHost::for_test(platform, name, &gpus)?;
    host.join_gpus(nvlinks)?;
    Ok(host)
}

/// A job whose counters are on all of its GPUs, checkpointed on `from` and sent to `to`.
fn send(from: &GpuHost, to: &GpuHost, gpus: &[&str]) -> Result<()> {
    let devices = gpus.join(",");
    let owner = ["--annotation", "firn.dev/peer-access=none"];
    let job = Container::count_with(from, "job", gpus, gpus.len(), &owner, &["--gpu", &devices])?;
    job.goes_on(3)?;
    job.checkpoint("checkpoint/job")?;
    job.remove()?;
    from.idle()?;
    from.send_image("checkpoint/job", to).map(drop)
}

/// The restore is refused with this code before runc is called, and nothing is left.
fn expect_refused(host: &GpuHost, restore: &str, code: &str) -> Result<()> {
    host.configure(&format!("[restore]\n{restore}\n"))?;
    let output = failure(Container::restore(host, "job", "checkpoint/job", 2).map(drop))?;
    ensure!(
        output.contains(&format!("{code}:")),
        "{restore}: not {code} but:\n{output}"
    );
    ensure!(output.contains("hint: "), "no hint in:\n{output}");
    ensure!(!host.runc_has("restore")?, "runc was called");
    host.node().run(&["ctr", "containers", "delete", "job"])?;
    nothing_left(host, "job")?;
    host.idle()
}

/// The restore continues, on these GPUs. Returns containerd's log lines about it.
fn restored(host: &GpuHost, restore: &str, counters: usize, on: &[usize]) -> Result<String> {
    host.configure(&format!("[restore]\n{restore}\n"))?;
    let before = host.log_length()?;
    let (job, _) = Container::restore(host, "job", "checkpoint/job", counters).context(restore.to_owned())?;
    job.goes_on(3)?;
    let expected: Vec<String> = on.iter().map(|at| host.uuids()[*at].clone()).collect();
    let used = job.gpus_in_use()?;
    ensure!(used == expected, "{restore}: on {used:?}, not on {expected:?}");
    job.remove()?;
    host.idle()?;
    host.log_since(before)
}

fn linked_gpus_stay_linked_and_each_policy_holds(platform: Platform) -> Result<()> {
    let hosts = [
        host(platform, "rm-2a", 1, &["0-1=4", "2-3=4"])?,
        host(platform, "rm-2b", 5, &["0-3=4", "1-2=4"])?,
    ];
    on(hosts, |[a, b]| {
        send(a, b, &["0", "1"])?;
        b.watch_runc()?;
        expect_refused(
            b,
            r#"gpus = ["0", "1"]
policy = "strict""#,
            "FIRN-GPU-STRICT",
        )?;
        expect_refused(b, r#"gpus = ["0", "1"]"#, "FIRN-GPU-TOPOLOGY")?;

        let log = restored(
            b,
            r#"gpus = ["0", "1", "2", "3"]
policy = "subset""#,
            2,
            &[0, 3],
        )?;
        ensure!(!log.contains("NVLinks between them"), "links were lost:\n{log}");
        ensure!(
            log.contains("continue to use"),
            "no word of the bus id in:\n{log}"
        );
        restored(b, r#"gpus = ["1", "2"]"#, 2, &[1, 2])?;
        let pairs: Vec<String> = [0, 1]
            .map(|at| format!("\"{}={}\"", a.uuids()[at], b.uuids()[at]))
            .to_vec();
        let map = format!("gpus = [\"0\", \"1\"]\ngpu-map = [{}]", pairs.join(", "));
        let log = restored(b, &map, 2, &[0, 1])?;
        ensure!(log.contains("had 4 NVLinks between them"), "no report in:\n{log}");
        Ok(())
    })
}

/// Older drivers as the documentation has them; none was seen.
fn older_drivers_restore_onto_the_same_gpu_or_refuse(platform: Platform) -> Result<()> {
    let gpus = [SimGpu::h200(21), SimGpu::h200(22)];
    let host = GpuHost::for_test(platform, "rm-old", &gpus)?;
    on([host], |[host]| {
        host.replace_gpus(&gpus, "570.124.06")?;
        let job = Container::count(host, "job", &["0"], 1, &[])?;
        job.goes_on(3)?;
        job.checkpoint("checkpoint/job")?;
        job.remove()?;
        host.idle()?;
        host.watch_runc()?;
        expect_refused(host, r#"gpus = ["1"]"#, "FIRN-DRIVER-TOO-OLD")?;
        restored(host, r#"gpus = ["0"]"#, 1, &[0])?;

        let job = Container::count(host, "job", &["0"], 1, &[])?;
        job.goes_on(3)?;
        // What runs keeps its library; firn-gpu opens the one that is there.
        let install = [
            "simgpu",
            "install",
            "--from",
            "/tmp/simgpu",
            "--driver",
            "550.163.01",
        ];
        host.node().run(&install)?;
        let output = failure(job.checkpoint("checkpoint/none"))?;
        ensure!(output.contains("FIRN-DRIVER-TOO-OLD:"), "{output}");
        job.goes_on(3)?;
        job.remove()?;
        host.idle()
    })
}

fn four_gpus_are_permuted_so_that_pairs_stay_linked(platform: Platform) -> Result<()> {
    let hosts = [
        host(platform, "rm-4a", 11, &["0-1=4", "2-3=4"])?,
        host(platform, "rm-4b", 15, &["0-3=4", "1-2=4"])?,
    ];
    on(hosts, |[a, b]| {
        send(a, b, &["0", "1", "2", "3"])?;
        b.watch_runc()?;
        let log = restored(b, "", 4, &[0, 1, 2, 3])?;
        let [a, b] = [a.uuids(), b.uuids()];
        for (old, new) in [(0, 0), (1, 3), (2, 1), (3, 2)] {
            let pair = format!("gpu map: {} -> {}", a[old], b[new]);
            ensure!(log.contains(&pair), "no {pair} in:\n{log}");
        }
        Ok(())
    })
}

pub(crate) fn suite() -> matrix::Suite {
    matrix::Suite::new(&cases! {
        linked_gpus_stay_linked_and_each_policy_holds [FORKY];
        older_drivers_restore_onto_the_same_gpu_or_refuse [FORKY];
        four_gpus_are_permuted_so_that_pairs_stay_linked [FORKY];
    })
}
