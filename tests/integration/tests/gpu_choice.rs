//! Which GPUs a restored container gets: by the target's configuration, by a map there, or by the container's
//! annotation.

use anyhow::{Context, Result, ensure};
use firn_lab::{Container, GpuHost, SimGpu, cases, matrix, nothing_left, on};
use firn_node::Platform;

/// Two nodes with two GPUs each: 1 and 2 on the first, 3 and 4 on the second.
fn pair(platform: Platform, name: &str) -> Result<[GpuHost; 2]> {
    let host = |letter: &str, first| {
        let gpus = [SimGpu::h200(first), SimGpu::h200(first + 1)];
        GpuHost::for_test(platform, &format!("{name}-{letter}"), &gpus)
    };
    Ok([host("a", 1)?, host("b", 3)?])
}

/// `GPU-old=GPU-new` for each pair of numbers.
fn map(pairs: &[(u32, u32)]) -> Vec<String> {
    let uuid = |number: &u32| SimGpu::h200(*number).uuid;
    pairs
        .iter()
        .map(|(old, new)| format!("{}={}", uuid(old), uuid(new)))
        .collect()
}

/// Checkpoints a counter that is granted `gpus` and computes on the first of them only, and sends its image.
fn image(a: &GpuHost, b: &GpuHost, gpus: &[&str], options: &[&str]) -> Result<()> {
    let job = Container::count_with(a, "job", gpus, 1, options, &[])?;
    job.goes_on(3)?;
    job.checkpoint("checkpoint/job")?;
    job.remove()?;
    a.send_image("checkpoint/job", b).map(drop)
}

/// The image restores onto this GPU, where the counter continues.
fn lands_on(host: &GpuHost, number: u32) -> Result<()> {
    let (copy, _) = Container::restore(host, "job", "checkpoint/job", 1)?;
    copy.goes_on(3)?;
    let used = copy.gpus_in_use()?;
    ensure!(
        used == [SimGpu::h200(number).uuid],
        "on {used:?}, not on GPU {number}"
    );
    copy.remove()?;
    host.idle()
}

fn the_configuration_chooses_the_gpu(platform: Platform) -> Result<()> {
    on(pair(platform, "cf-gpus")?, |[a, b]| {
        image(a, b, &["0"], &[])?;
        lands_on(b, 3).context("no configuration: the node that the spec names")?;
        for (configuration, expected) in [
            ("gpus = [\"1\"]".to_owned(), 4),
            (format!("gpus = [{:?}]", SimGpu::h200(4).uuid), 4),
            ("gpus = [\"1\", \"0\"]".to_owned(), 4),
            (format!("gpu-map = {:?}", map(&[(1, 4)])), 4),
            (
                format!("gpus = [\"0\", \"1\"]\ngpu-map = {:?}", map(&[(1, 4)])),
                4,
            ),
            // A pair for a GPU that the checkpoint does not hold counts for others.
            (format!("gpu-map = {:?}", map(&[(9, 4)])), 3),
        ] {
            b.configure(&format!("[restore]\n{configuration}\n"))?;
            lands_on(b, expected).with_context(|| configuration.clone())?;
        }
        Ok(())
    })
}

fn the_configuration_chooses_among_device_nodes(platform: Platform) -> Result<()> {
    on(pair(platform, "cf-nodes")?, |[a, b]| {
        image(a, b, &["0"], &[])?;
        b.configure("[restore]\ngpus = [\"1\"]\n")?;
        lands_on(b, 4)
    })
}

fn a_map_in_the_configuration_swaps_two_gpus(platform: Platform) -> Result<()> {
    on(pair(platform, "cf-cross")?, |[a, b]| {
        image(a, b, &["0", "1"], &[])?;
        lands_on(b, 3).context("no map: in order")?;
        b.configure(&format!("[restore]\ngpu-map = {:?}\n", map(&[(1, 4), (2, 3)])))?;
        lands_on(b, 4)
    })
}

fn the_annotation_of_the_container_wins_over_the_configuration(platform: Platform) -> Result<()> {
    on(pair(platform, "cf-anno")?, |[a, b]| {
        let annotation = format!("firn.dev/gpu-map={}", map(&[(1, 4), (2, 3)]).join(","));
        image(a, b, &["0", "1"], &["--annotation", &annotation])?;
        lands_on(b, 4)?;
        b.configure(&format!("[restore]\ngpu-map = {:?}\n", map(&[(1, 3), (2, 4)])))?;
        lands_on(b, 4)
    })
}

fn an_annotation_swaps_two_gpus_of_one_node(platform: Platform) -> Result<()> {
    let gpus = [SimGpu::h200(1), SimGpu::h200(2)];
    on([GpuHost::for_test(platform, "cf-swap", &gpus)?], |[host]| {
        let annotation = format!("firn.dev/gpu-map={}", map(&[(1, 2), (2, 1)]).join(","));
        let job = Container::count_with(host, "job", &["0", "1"], 1, &["--annotation", &annotation], &[])?;
        job.goes_on(3)?;
        job.checkpoint("checkpoint/job")?;
        assert_eq!(job.gpus_in_use()?, [SimGpu::h200(1).uuid]);
        job.remove()?;
        lands_on(host, 2)
    })
}

fn maps_that_cannot_be_used_are_refused(platform: Platform) -> Result<()> {
    on(pair(platform, "cf-bad")?, |[a, b]| {
        image(a, b, &["0", "1"], &[])?;
        for (maps, code) in [
            (vec!["GPU-1".to_owned()], "FIRN-MAP-SYNTAX"),
            (map(&[(1, 3)]), "FIRN-MAP-INCOMPLETE"),
            (map(&[(1, 3), (2, 3)]), "FIRN-MAP-DUPLICATE"),
            (map(&[(1, 3), (1, 4)]), "FIRN-MAP-DUPLICATE"),
        ] {
            b.configure(&format!("[restore]\ngpus = [\"0\", \"1\"]\ngpu-map = {maps:?}\n"))?;
            let output = match Container::restore(b, "job", "checkpoint/job", 1) {
                Ok(_) => anyhow::bail!("{maps:?} was taken"),
                Err(error) => format!("{error:#}"),
            };
            ensure!(
                output.contains(&format!("{code}:")),
                "{maps:?}: not {code} but\n{output}"
            );
            b.node().run(&["ctr", "containers", "delete", "job"])?;
            nothing_left(b, "job")?;
        }
        b.idle()
    })
}

pub(crate) fn suite() -> matrix::Suite {
    matrix::Suite::new(&cases! {
        the_configuration_chooses_the_gpu [FORKY];
        the_configuration_chooses_among_device_nodes [TRIXIE];
        a_map_in_the_configuration_swaps_two_gpus [FORKY];
        the_annotation_of_the_container_wins_over_the_configuration [FORKY];
        an_annotation_swaps_two_gpus_of_one_node [FORKY];
        maps_that_cannot_be_used_are_refused [FORKY];
    })
}
