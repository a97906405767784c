//! The main job: a counter in GPU memory goes on after a checkpoint and on another GPU after a restore.

use std::sync::OnceLock;

use anyhow::Result;
use firn_lab::{Built, Container, GpuHost, Profile, SimGpu, on};
use firn_node::Suite;

fn built() -> &'static Built {
    static BUILT: OnceLock<Built> = OnceLock::new();
    BUILT.get_or_init(|| Built::build(Profile::Dev).expect("build the workspace"))
}

/// Two nodes whose GPUs have nothing in common; a move from the first GPUs of one to those of the other.
fn story(suite: Suite, tag: &str, gpus: &[&str], counters: usize, arguments: &[&str]) -> Result<()> {
    let a = GpuHost::start(
        built(),
        suite,
        &format!("{tag}a"),
        &[SimGpu::h200(1), SimGpu::h200(2)],
    )?;
    let b = GpuHost::start(
        built(),
        suite,
        &format!("{tag}b"),
        &[SimGpu::h200(3), SimGpu::h200(4)],
    )?;
    on([a, b], |[a, b]| {
        let uuids = |host: &GpuHost| -> Vec<String> {
            let all = host.uuids();
            if gpus.contains(&"all") {
                all
            } else {
                all[..1].to_vec()
            }
        };
        let container = Container::count(a, "job", gpus, counters, arguments)?;
        let before = container.goes_on(3)?;
        assert_eq!(container.gpus_in_use()?, uuids(a));

        container.checkpoint("checkpoint/job")?;
        // Leave running: the source goes on with its GPU state.
        let after = container.goes_on(3)?;
        assert!(after.reached(counters) > before.reached(counters));
        assert_eq!(container.status()?, "RUNNING");
        container.remove()?;
        a.idle()?;

        a.send_image("checkpoint/job", b)?;
        let (moved, _) = Container::restore(b, "job", "checkpoint/job", counters)?;
        let first = moved.lines()?.reached(counters);
        let last = moved.goes_on(5)?;
        assert!(
            first >= before.reached(counters),
            "the restored log begins before the checkpoint"
        );
        assert!(last.reached(counters) >= first + 5);
        assert_eq!(
            moved.gpus_in_use()?,
            uuids(b),
            "memory is not on the target's GPUs"
        );
        assert_eq!(moved.status()?, "RUNNING");
        moved.remove()?;
        b.idle()
    })
}

#[test]
fn one_process_on_one_gpu_forky() -> Result<()> {
    story(Suite::Forky, "f1", &["0"], 1, &[])
}

#[test]
fn one_process_on_one_gpu_trixie() -> Result<()> {
    story(Suite::Trixie, "t1", &["0"], 1, &[])
}
