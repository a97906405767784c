//! NVIDIA's container toolkit: its generator of CDI files, its hooks and its container runtime, and a monitor
//! that uses NVIDIA's bindings of NVML, over simulated GPUs.
//!
//! Needs root, and Go to build the programs.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use firn_lab::{BUNDLES, Container, FIRN, GpuHost, SimGpu, Skip, cases, matrix, on};
use firn_node::{GoOptions, Platform, go_build, go_build_of, go_lacks};
use serde::Deserialize;

const MODULE: &str = "github.com/NVIDIA/nvidia-container-toolkit";
const VERSION: &str = "v1.20.2";
const PROGRAMS: [&str; 3] = ["nvidia-ctk", "nvidia-cdi-hook", "nvidia-container-runtime"];
const WRAPPER: &str = "/usr/bin/nvidia-container-runtime";
/// Its configuration.
const SETTINGS: &str = "/etc/nvidia-container-runtime/config.toml";
const CDI: &str = "/etc/cdi/nvidia.yaml";

/// NVML is called by names of functions, of which a driver may lack some.
const BY_NAME: GoOptions = GoOptions {
    cgo: true,
    ldflags: "-extldflags=-Wl,-z,lazy",
    tags: "",
};

const COUNT: [&str; 7] = [
    "/bin/gpu-counter",
    "--out",
    "/counter.log",
    "--interval-ms",
    "50",
    "--mib",
    "8",
];

const NODES: [&str; 6] = [
    "--device",
    "/dev/nvidia0",
    "--device",
    "/dev/nvidiactl",
    "--device",
    "/dev/nvidia-uvm",
];

/// The toolkit looks for character devices, and simulated GPUs are block devices (decision 0006).
fn with_block_devices(source: &Path) -> Result<()> {
    for file in [
        "internal/devices/devices.go",
        "cmd/nvidia-cdi-hook/update-application-profile/minors_linux.go",
    ] {
        let file = source.join(file);
        let text = std::fs::read_to_string(&file)?;
        ensure!(
            text.contains("os.ModeCharDevice"),
            "{} has changed",
            file.display()
        );
        std::fs::write(&file, text.replace("os.ModeCharDevice", "os.ModeDevice"))?;
    }
    Ok(())
}

/// Two nodes with the toolkit's programs and CDI files that it has generated. The second one has other GPUs
/// in other places.
fn pair(platform: Platform, name: &str) -> Result<[GpuHost; 2]> {
    if let Some(reason) = go_lacks() {
        return Err(Skip::new(format!("NVIDIA's toolkit is not built: {reason}")).into());
    }
    let a = GpuHost::for_test(platform, &format!("{name}-a"), &[SimGpu::h200(1)])?;
    let gpus = [
        SimGpu::h200(2).at(3, "00000000:9D:00.0"),
        SimGpu::h200(3).at(0, "00000000:C3:00.0"),
    ];
    let b = GpuHost::for_test(platform, &format!("{name}-b"), &gpus)?;
    for host in [&a, &b] {
        for program in PROGRAMS {
            let package = format!("cmd/{program}");
            let built = go_build_of(MODULE, VERSION, &package, BY_NAME, with_block_devices)?;
            host.node().install(built, format!("/usr/bin/{program}"), 0o755)?;
        }
        host.node().run(&["rm", "/etc/cdi/nvidia.json"])?;
        generate(host)?;
    }
    Ok([a, b])
}

fn generate(host: &GpuHost) -> Result<()> {
    let generate = ["nvidia-ctk", "cdi", "generate", "--output", CDI];
    host.node().run(&generate).map(drop)
}

fn count<'h>(host: &'h GpuHost, id: &str, options: &[&str]) -> Result<Container<'h>> {
    let options = [&["--runtime", FIRN], options].concat();
    Ok(Container::run(host, id, &options, &COUNT)?.counting(1))
}

/// What the toolkit's hooks make in a container.
fn hooks_have_run(container: &Container<'_>) -> Result<()> {
    let seen = container.exec(&[
        "sh",
        "-c",
        "readlink /usr/lib/x86_64-linux-gnu/libcuda.so.1; grep -c libcuda.so.1 /etc/ld.so.cache",
    ])?;
    ensure!(
        seen == "libcuda.so.580.159.04\n1\n",
        "the hooks have made: {seen}"
    );
    Ok(())
}

/// The driver's profile names the first GPU of the node, where its number is one that the hook writes.
fn has_a_profile(host: &GpuHost, container: &Container<'_>) -> Result<()> {
    let minor = host.node().run(&["stat", "-c", "%T", "/dev/nvidia0"])?.stdout;
    let minor = u32::from_str_radix(minor.trim(), 16)?;
    if minor < 64 {
        let profile = "/etc/nvidia/nvidia-application-profiles-rc.d/10-container.conf";
        let profile = container.exec(&["cat", profile])?;
        ensure!(
            profile.contains(&format!("{:#x}]", 1_u64 << minor)),
            "GPU {minor}: {profile}"
        );
    }
    Ok(())
}

/// The hook whose mount CRIU cannot dump is not in the spec that runc gets.
fn has_no_mounting_hook(host: &GpuHost, id: &str) -> Result<()> {
    let spec = host.node().read(format!("{BUNDLES}/{id}/config.json"))?;
    ensure!(spec.contains("update-ldcache"), "no hooks in {spec}");
    ensure!(!spec.contains("disable-device-node-modification"), "{spec}");
    Ok(())
}

/// Runs a counter that lives through a checkpoint and continues on the other node. Returns it there.
fn moves<'h>(a: &GpuHost, b: &'h GpuHost, options: &[&str], gpu: usize) -> Result<Container<'h>> {
    let source = count(a, "job", options)?;
    source.goes_on(3)?;
    hooks_have_run(&source)?;
    has_a_profile(a, &source)?;
    has_no_mounting_hook(a, "job")?;
    source.checkpoint("checkpoint/job")?;
    source.goes_on(3)?;
    source.remove()?;
    a.send_image("checkpoint/job", b)?;
    let (copy, _) = Container::restore(b, "job", "checkpoint/job", 1)?;
    copy.goes_on(5)?;
    ensure!(copy.gpus_in_use()? == b.uuids()[gpu..=gpu], "not on GPU {gpu}");
    hooks_have_run(&copy)?;
    for host in [a, b] {
        host.remove_image("checkpoint/job")?;
    }
    Ok(copy)
}

fn a_cdi_file_of_the_toolkit_gives_gpus_that_move(platform: Platform) -> Result<()> {
    on(pair(platform, "tk-cdi")?, |[a, b]| {
        let listed = a.node().run(&["firn", "cdi", "list"])?.stdout;
        ensure!(
            listed.contains(&format!("nvidia.com/gpu={}", a.uuids()[0])),
            "{listed}"
        );
        // The node with the source's path is the second GPU there.
        moves(a, b, &["--device", "nvidia.com/gpu=0"], 1)?.remove()?;
        // Its files mount what stands for no device.
        for host in [&*a, &*b] {
            host.configure("[create]\nvolume-mounts = true\nvisible-devices = true\n")?;
        }
        moves(a, b, &["--device", "nvidia.com/gpu=0"], 1)?.remove()?;
        ensure!(!a.log().contains("gpu=void"), "a device void was requested");
        // Nodes are the grant, and a name adds the libraries.
        let by_name = [&NODES[..], &["--env", "NVIDIA_VISIBLE_DEVICES=0"]].concat();
        moves(a, b, &by_name, 1)?.remove()?;
        [a, b].into_iter().try_for_each(|host| host.idle())
    })
}

/// Options of `ctr run` for a container that NVIDIA's runtime would create.
const WRAPPED: [&str; 4] = ["--runtime", "io.containerd.runc.v2", "--runc-binary", WRAPPER];

fn nvidias_runtime_has_nothing_left_to_do(platform: Platform) -> Result<()> {
    on(pair(platform, "tk-run")?, |[a, b]| {
        // ctr names a runtime to no other shim.
        a.drop_in()?;
        b.drop_in()?;
        let by_name = [&WRAPPED[..], &["--env", "NVIDIA_VISIBLE_DEVICES=0"]].concat();
        moves(a, b, &by_name, 0)?.remove()?;
        let by_nodes = [&by_name[..], &NODES].concat();
        moves(a, b, &by_nodes, 0)?.remove()?;
        for settings in [
            "[nvidia-container-runtime]\nmode = \"cdi\"\n",
            "[nvidia-container-runtime]\nmode = \"jit-cdi\"\n",
            "[nvidia-container-runtime]\nmode = \"legacy\"\n",
            "accept-nvidia-visible-devices-as-volume-mounts = true\n",
        ] {
            a.node().write(SETTINGS, settings)?;
            given_by_firn(a, &by_name).with_context(|| settings.to_owned())?;
            // containerd has given it.
            let finished = [&WRAPPED[..], &["--device", "nvidia.com/gpu=0"]].concat();
            given_by_firn(a, &finished).with_context(|| format!("CDI with {settings}"))?;
        }
        a.node().run(&["rm", SETTINGS])?;
        by_the_wrapper(a, &by_name)
    })
}

/// The container has the edits of the node's CDI file, whose hooks are not those that NVIDIA's runtime adds.
fn given_by_firn(host: &GpuHost, options: &[&str]) -> Result<()> {
    let container = count(host, "given", options)?;
    container.goes_on(2)?;
    has_no_mounting_hook(host, "given")?;
    let spec = host.node().read(format!("{BUNDLES}/given/config.json"))?;
    ensure!(spec.contains("/usr/bin/nvidia-cdi-hook"), "{spec}");
    ensure!(
        !spec.contains("/usr/bin/nvidia-ctk"),
        "NVIDIA's runtime was called: {spec}"
    );
    container.remove()
}

/// Without a CDI file of the node NVIDIA's runtime makes its own edits.
fn by_the_wrapper(host: &GpuHost, options: &[&str]) -> Result<()> {
    host.node().run(&["rm", CDI])?;
    let container = count(host, "kept", options)?;
    container.goes_on(2)?;
    ensure!(host.log().contains("FIRN-NO-CDI-SPEC"), "no report");
    let spec = host.node().read(format!("{BUNDLES}/kept/config.json"))?;
    ensure!(spec.contains("\"disable-device-node-modification\""), "{spec}");
    container.remove()?;
    let plain = [&WRAPPED[..], &["--env", "NVIDIA_VISIBLE_DEVICES=void"]].concat();
    let plain = Container::run(host, "plain", &plain, &["sleep", "1000"])?;
    ensure!(plain.status()? == "RUNNING", "it does not run");
    plain.remove()?;
    host.idle()
}

fn limits_of_gpu_memory_hold_on_the_new_gpu(platform: Platform) -> Result<()> {
    on(pair(platform, "tk-limit")?, |[a, b]| {
        let limited = [
            "--device",
            "nvidia.com/gpu=0",
            "--env",
            "NVIDIA_GPU_MEMORY_LIMIT=64",
        ];
        moves(a, b, &limited, 1)?.remove()?;
        for (host, gpu) in [(&*a, 0), (&*b, 1)] {
            let limits = host.node().read("/run/simgpu/memory-limits")?;
            let words: Vec<&str> = limits.split_whitespace().collect();
            let bytes = (64 << 20).to_string();
            ensure!(words.len() == 4, "one limit, not {limits}");
            ensure!(
                words[0] == host.uuids()[gpu] && words[1].ends_with("/job"),
                "{limits}"
            );
            ensure!(words[2..] == [&bytes, &bytes], "{limits}");
        }
        Ok(())
    })
}

const MONITOR: &str = "/usr/local/bin/nvml-monitor";

/// What a monitor sees of a GPU.
#[derive(Debug, Deserialize)]
struct Seen {
    uuid: String,
    /// Bytes in use.
    used: u64,
    processes: Vec<Holder>,
}

/// A process that has memory of a GPU.
#[derive(Debug, Deserialize, PartialEq, Eq)]
struct Holder {
    pid: i32,
    used: u64,
}

fn seen(host: &GpuHost) -> Result<Vec<Seen>> {
    let output = host.node().run(&[MONITOR])?.stdout;
    serde_json::from_str(&output).with_context(|| output.clone())
}

/// No GPU has memory in use.
fn is_free(host: &GpuHost) -> Result<()> {
    let seen = seen(host)?;
    ensure!(
        seen.iter().all(|gpu| gpu.used == 0 && gpu.processes.is_empty()),
        "{seen:?}"
    );
    Ok(())
}

/// The memory of this GPU is the process's, and no other GPU's is.
fn is_on(host: &GpuHost, gpu: usize, container: &Container<'_>) -> Result<u64> {
    let seen = seen(host)?;
    let uuids: Vec<&String> = seen.iter().map(|gpu| &gpu.uuid).collect();
    ensure!(uuids == host.uuids().iter().collect::<Vec<_>>(), "{seen:?}");
    for (place, found) in seen.iter().enumerate() {
        let holder = Holder {
            pid: container.pid()?,
            used: found.used,
        };
        let expected = if place == gpu { vec![holder] } else { Vec::new() };
        ensure!(found.processes == expected, "GPU {place} of {seen:?}");
    }
    Ok(seen[gpu].used)
}

fn a_monitor_sees_whose_memory_it_is_before_and_after(platform: Platform) -> Result<()> {
    on(pair(platform, "tk-mon")?, |[a, b]| {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("nvml-monitor");
        let monitor: PathBuf = go_build(&source, "nvml-monitor", BY_NAME)?;
        for host in [&*a, &*b] {
            host.node().install(&monitor, MONITOR, 0o755)?;
            is_free(host)?;
        }
        let source = count(
            a,
            "job",
            &[
                "--device",
                "nvidia.com/gpu=0",
                "--annotation",
                "firn.dev/pause=release-gpu",
            ],
        )?;
        source.goes_on(3)?;
        let before = is_on(a, 0, &source)?;
        ensure!(before >= 8 << 20, "{before} bytes");
        source.checkpoint("checkpoint/job")?;
        source.goes_on(3)?;
        ensure!(is_on(a, 0, &source)? == before, "its memory has changed");
        source.task(&["pause"])?;
        is_free(a).context("while it is paused")?;
        source.task(&["resume"])?;
        source.goes_on(3)?;
        source.remove()?;
        is_free(a)?;
        a.send_image("checkpoint/job", b)?;
        let (copy, _) = Container::restore(b, "job", "checkpoint/job", 1)?;
        copy.goes_on(3)?;
        ensure!(is_on(b, 1, &copy)? == before, "its memory has changed");
        copy.remove()?;
        is_free(b)
    })
}

pub(crate) fn suite() -> matrix::Suite {
    matrix::Suite::new(&cases! {
        a_cdi_file_of_the_toolkit_gives_gpus_that_move [FORKY];
        nvidias_runtime_has_nothing_left_to_do [FORKY];
        limits_of_gpu_memory_hold_on_the_new_gpu [FORKY_V2];
        a_monitor_sees_whose_memory_it_is_before_and_after [FORKY];
    })
}
