//! The ways in which a container can ask for GPUs: each ends in a container that can be checkpointed, and
//! restored on a node with other GPUs.
//!
//! Needs root. The specs are those that the real tools write; only the driver is simulated.

use anyhow::{Context, Result, ensure};
use firn_lab::{BUNDLES, Container, FIRN, GpuHost, SimGpu, cases, matrix, on};
use firn_node::Platform;

/// The CDI file of a node.
const CDI: &str = "/etc/cdi/nvidia.yaml";

/// The program that counts, as every container here runs it.
const COUNT: [&str; 7] = [
    "/bin/gpu-counter",
    "--out",
    "/counter.log",
    "--interval-ms",
    "50",
    "--mib",
    "8",
];

/// A node whose CDI file is firn's own.
fn host(platform: Platform, name: &str, gpus: &[SimGpu]) -> Result<GpuHost> {
    let host = GpuHost::for_test(platform, name, gpus)?;
    generate(&host)?;
    Ok(host)
}

fn generate(host: &GpuHost) -> Result<()> {
    host.node().run(&["rm", "/etc/cdi/nvidia.json"])?;
    let generated = host.node().run(&["firn", "cdi", "generate", "--output", CDI]);
    generated.map(drop)
}

/// Two nodes whose GPUs have nothing in common but the model: neither UUID, minor number nor PCI address. On
/// the second one the first GPU has another minor number, the second GPU has that of the first node's, and
/// UVM's nodes are another driver's in the kernel's count.
fn pair(platform: Platform, name: &str) -> Result<[GpuHost; 2]> {
    let a = host(platform, &format!("{name}-a"), &[SimGpu::h200(1)])?;
    let gpus = [
        SimGpu::h200(2).at(3, "00000000:9D:00.0"),
        SimGpu::h200(3).at(0, "00000000:C3:00.0"),
    ];
    let mut b = GpuHost::for_test(platform, &format!("{name}-b"), &gpus)?;
    b.renumber()?;
    generate(&b)?;
    let [of_a, of_b] = [&a, &b].map(|host| major(host, UVM));
    ensure!(of_a? != of_b?, "UVM has the same major number on both nodes");
    Ok([a, b])
}

/// The nodes of a driver, as a program sees them: name, major and minor number.
const NODES: [&str; 3] = ["sh", "-c", "stat -c '%n %t:%T' /dev/nvidia*"];

const UVM: &str = "/dev/nvidia-uvm";

fn major(host: &GpuHost, node: &str) -> Result<String> {
    Ok(host.node().run(&["stat", "-c", "%t", node])?.stdout)
}

/// The container has nodes of its node's devices, and no other.
fn has_nodes_of(container: &Container<'_>, host: &GpuHost) -> Result<()> {
    let (has, there) = (container.exec(&NODES)?, host.node().run(&NODES)?.stdout);
    ensure!(has.contains(UVM), "no {UVM} in:\n{has}");
    for line in has.lines() {
        ensure!(there.contains(line), "{line} is not among:\n{there}");
    }
    Ok(())
}

/// Runs a counter with these options of `ctr run`.
fn count<'h>(host: &'h GpuHost, id: &str, options: &[&str]) -> Result<Container<'h>> {
    let options = [&["--runtime", FIRN], options].concat();
    Ok(Container::run(host, id, &options, &COUNT)?.counting(1))
}

/// The container runs on the first GPU, lives through a checkpoint, and continues on another node.
fn moves(a: &GpuHost, b: &GpuHost, options: &[&str], expected: &str) -> Result<()> {
    let source = count(a, "job", options)?;
    source.goes_on(3)?;
    ensure!(
        source.gpus_in_use()? == a.uuids()[..1],
        "not on the GPU that was asked for"
    );
    source.checkpoint("checkpoint/job")?;
    source.goes_on(3)?;
    source.remove()?;
    a.send_image("checkpoint/job", b)?;
    let (copy, _) = Container::restore(b, "job", "checkpoint/job", 1)?;
    copy.goes_on(5)?;
    ensure!(copy.gpus_in_use()? == [expected], "not on the other node's GPU");
    has_nodes_of(&copy, b)?;
    copy.remove()?;
    for host in [a, b] {
        host.remove_image("checkpoint/job")?;
        host.idle()?;
    }
    Ok(())
}

fn firn_cdi_generate_serves_a_node_with_the_driver_alone(platform: Platform) -> Result<()> {
    on(pair(platform, "ak-gen")?, |[a, b]| {
        let listed = a.node().run(&["firn", "cdi", "list"])?.stdout;
        ensure!(
            listed.contains(&format!("nvidia.com/gpu={}", a.uuids()[0])),
            "{listed}"
        );
        let refused = a
            .node()
            .run(&["firn", "cdi", "generate", "--output", "/etc/cdi/other.yaml"]);
        let output = format!("{:#}", refused.err().context("a second file was written")?);
        ensure!(output.contains("FIRN-CDI-EXISTS"), "{output}");
        // The spec names /dev/nvidia0, which is another GPU there.
        moves(a, b, &["--device", "nvidia.com/gpu=0"], &b.uuids()[1])
    })
}

/// Stands for a tool that ctr wants to see, and that must not be run.
const NEVER: &str = "#!/bin/sh\necho \"$0\" >> /run/hook-ran\nexit 1\n";

/// NVIDIA's hook, as far as it matters here: it mounts a part of a file system into the container, behind the
/// runtime.
const HOOK: &str = r#"#!/bin/sh -e
echo "$0" >> /run/hook-ran
bundle=$(sed 's/.*"bundle":"\([^"]*\)".*/\1/')
mkdir -p /run/driver/part "$bundle/rootfs/foreign"
mount -t tmpfs driver /run/driver && mkdir /run/driver/part
mount --bind /run/driver/part "$bundle/rootfs/foreign"
umount -l /run/driver
"#;

/// Puts NVIDIA's hook into every spec before the shim sees it, as docker does.
const AS_DOCKER: &str = r#"#!/bin/sh
name=nvidia-container-runtime-hook
hook='{"path":"/usr/local/bin/'$name'","args":["'$name'","prestart"]}'
case " $* " in *" start "*) sed -i "s|^{|{\"hooks\":{\"prestart\":[$hook]},|" config.json ;; esac
exec /usr/local/libexec/containerd-shim-firn-v2 "$@"
"#;

const SHIM: &str = "/usr/local/bin/containerd-shim-firn-v2";

fn install(host: &GpuHost, script: &str, path: &str) -> Result<()> {
    let file = tempfile::NamedTempFile::new()?;
    std::fs::write(file.path(), script)?;
    host.node().install(file.path(), path, 0o755)
}

/// Makes every container of this node one that has NVIDIA's hook.
fn as_docker(host: &GpuHost) -> Result<()> {
    host.node().install(
        host.node().path(SHIM),
        "/usr/local/libexec/containerd-shim-firn-v2",
        0o755,
    )?;
    install(host, AS_DOCKER, SHIM)?;
    install(host, HOOK, "/usr/local/bin/nvidia-container-runtime-hook")
}

fn hook_ran(host: &GpuHost) -> bool {
    host.node().path("/run/hook-ran").exists()
}

fn requests_by_hook_and_by_variable_move(platform: Platform) -> Result<()> {
    on(pair(platform, "ak-ask")?, |[a, b]| {
        for host in [&*a, &*b] {
            install(host, NEVER, "/usr/local/bin/nvidia-container-cli")?;
        }
        // By the hook of `ctr run --gpus`.
        moves(a, b, &["--gpus", "0"], &b.uuids()[0])?;

        // By a name alone, where the operator lets it count.
        let mounted = "type=bind,src=/dev/null,dst=/var/run/nvidia-container-devices/0,options=rbind";
        let by_mount = [
            "--mount",
            mounted,
            "--env",
            "NVIDIA_VISIBLE_DEVICES=/var/run/nvidia-container-devices",
        ];
        for host in [&*a, &*b] {
            host.configure(
                "[create]\nvisible-devices = true\nvolume-mounts = true\ncdi-annotations = true\n",
            )?;
        }
        moves(a, b, &by_mount, &b.uuids()[0])?;
        let by_annotation = ["--annotation", "cdi.k8s.io/plugin_a=nvidia.com/gpu=0"];
        moves(a, b, &by_annotation, &b.uuids()[0])?;

        // By a name that means nothing on the other node, whose configuration maps it to a device.
        let uuid = format!("NVIDIA_VISIBLE_DEVICES={}", a.uuids()[0]);
        b.configure("[create]\nvisible-devices = true\n[restore]\ngpus = [\"1\"]\n")?;
        moves(a, b, &["--env", &uuid], &b.uuids()[1])?;
        ensure!(!hook_ran(a) && !hook_ran(b), "nvidia-container-cli was run");
        Ok(())
    })
}

/// Options of ctr that give the libraries of the driver by hand, as who grants nodes has to.
fn libraries() -> Vec<String> {
    let mount = |name: &str| {
        let path = format!("/usr/lib/x86_64-linux-gnu/{name}");
        format!("type=bind,src={path},dst={path},options=rbind:ro")
    };
    let options = |name: &str| ["--mount".to_owned(), mount(name)];
    ["libcuda.so.1", "libnvidia-ml.so.1"].map(options).concat()
}

fn device_nodes_and_privileged_containers_move(platform: Platform) -> Result<()> {
    on(pair(platform, "ak-node")?, |[a, b]| {
        let [a, b] = [&*a, &*b];
        let libraries = libraries();
        let with = |options: &[&'static str]| -> Vec<String> {
            let options = options.iter().map(ToString::to_string);
            options.chain(libraries.iter().cloned()).collect()
        };
        let moved = |options: Vec<String>, expected: &str| {
            let options: Vec<&str> = options.iter().map(String::as_str).collect();
            moves(a, b, &options, expected)
        };
        let nodes = [
            "--device",
            "/dev/nvidia0",
            "--device",
            "/dev/nvidiactl",
            "--device",
            UVM,
        ];
        moved(with(&nodes), &b.uuids()[1])?;
        // A node and nothing else, which is of no use for CUDA.
        let alone = ["--runtime", FIRN, "--device", "/dev/nvidia0"];
        // A sleep that CRIU restores ends early.
        let idle = ["sh", "-c", "while :; do sleep 1; done"];
        let source = Container::run(a, "alone", &alone, &idle)?;
        source.checkpoint("checkpoint/alone")?;
        source.remove()?;
        a.send_image("checkpoint/alone", b)?;
        let (copy, _) = Container::restore(b, "alone", "checkpoint/alone", 0)?;
        ensure!(copy.status()? == "RUNNING", "it does not run");
        let (has, there) = (copy.exec(&NODES)?, b.node().run(&NODES)?.stdout);
        ensure!(
            has.lines().count() == 1 && there.contains(&has),
            "{has} of:\n{there}"
        );
        copy.remove()?;
        for host in [a, b] {
            host.remove_image("checkpoint/alone")?;
        }

        // Every GPU of its node is a privileged container's; on one with more somebody has to choose.
        b.configure("[restore]\ngpus = [\"0\"]\n")?;
        moved(with(&["--privileged"]), &b.uuids()[0])
    })
}

const WRAPPER: &str = "/usr/local/bin/nvidia-container-runtime";

/// NVIDIA's container runtime as it does in its mode `legacy`: of runc's commands it takes `create`, puts its
/// hook into the spec, and leaves the rest to runc.
const WRAPPING: &str = r#"#!/bin/sh -e
name=nvidia-container-runtime-hook
hook='{"path":"/usr/local/bin/'$name'","args":["'$name'","prestart"]}'
for word; do
    [ "$word" != create ] || echo create >>/run/wrapper-ran
    [ "$before" != --bundle ] || sed -i "s|^{|{\"hooks\":{\"prestart\":[$hook]},|" "$word/config.json"
    before=$word
done
exec /usr/sbin/runc "$@"
"#;

fn requests_by_nvidias_runtime_move_and_it_is_not_called(platform: Platform) -> Result<()> {
    on(pair(platform, "ak-wrap")?, |[a, b]| {
        for host in [&*a, &*b] {
            install(host, WRAPPING, WRAPPER)?;
            install(host, HOOK, "/usr/local/bin/nvidia-container-runtime-hook")?;
            // ctr names a runtime to no other shim.
            host.drop_in()?;
        }
        let wrapped = ["--runtime", "io.containerd.runc.v2", "--runc-binary", WRAPPER];
        // As Kubernetes' device plugin asks with PASS_DEVICE_SPECS: nodes, and a name for the libraries.
        let asked = [
            "--device",
            "/dev/nvidia0",
            "--device",
            "/dev/nvidiactl",
            "--device",
            UVM,
            "--env",
            "NVIDIA_VISIBLE_DEVICES=0",
        ];
        let options = [&wrapped[..], &asked].concat();
        moves(a, b, &options, &b.uuids()[0])?;
        for host in [&*a, &*b] {
            ensure!(
                !host.node().path("/run/wrapper-ran").exists(),
                "the wrapper was called"
            );
            ensure!(!hook_ran(host), "the hook was run");
        }

        // Settings that firn does not follow are the wrapper's.
        let file = "/etc/nvidia-container-runtime/config.toml";
        a.node()
            .write(file, "[nvidia-container-runtime]\nmode = \"csv\"\n")?;
        Container::run(a, "other", &options, &["sleep", "1000"])?.remove()?;
        ensure!(
            a.node().path("/run/wrapper-ran").exists(),
            "the wrapper was not called"
        );
        ensure!(a.log().contains("does not follow mode"), "no report");
        a.node().run(&["rm", file, "/run/wrapper-ran", "/run/hook-ran"])?;

        without_cdi_file(a, &wrapped, &options)
    })
}

/// Where firn cannot, the wrapper gives the GPUs as it does without firn, and nothing is lost.
fn without_cdi_file(a: &GpuHost, wrapped: &[&str], options: &[&str]) -> Result<()> {
    a.node().run(&["rm", CDI])?;
    let kept = Container::run(a, "kept", options, &["sleep", "1000"])?;
    ensure!(hook_ran(a), "the hook was not run");
    ensure!(a.log().contains("FIRN-NO-CDI-SPEC"), "no report");
    let output = kept.checkpoint("checkpoint/kept");
    let output = format!("{:#}", output.err().context("it was dumped")?);
    ensure!(output.contains("FIRN-GPU-HOOK"), "{output}");
    ensure!(kept.status()? == "RUNNING", "it does not run");
    kept.remove()?;
    // Who asks for nothing gets what the wrapper makes of it.
    a.node().run(&["rm", "/run/wrapper-ran"])?;
    Container::run(a, "plain", wrapped, &["sleep", "1000"])?.remove()?;
    ensure!(
        a.node().path("/run/wrapper-ran").exists(),
        "the wrapper was not called"
    );
    a.idle()
}

fn requests_by_the_hook_of_ctr_1_7_move(platform: Platform) -> Result<()> {
    on(pair(platform, "ak-old")?, |[a, b]| {
        install(a, NEVER, "/usr/local/bin/nvidia-container-cli")?;
        moves(a, b, &["--gpus", "0"], &b.uuids()[0])?;
        ensure!(!hook_ran(a), "nvidia-container-cli was run");
        Ok(())
    })
}

fn a_hook_that_mounts_is_replaced_by_its_edits(platform: Platform) -> Result<()> {
    on(pair(platform, "ak-hook")?, |[a, b]| {
        as_docker(a)?;
        as_docker(b)?;
        let all = ["--env", "NVIDIA_VISIBLE_DEVICES=0"];
        // Left as it is, it makes a container that cannot be dumped.
        a.configure("[create]\nhooks = \"keep\"\n")?;
        let kept = Container::run(
            a,
            "kept",
            &[&["--runtime", FIRN], &all[..]].concat(),
            &["sleep", "1000"],
        )?;
        ensure!(hook_ran(a), "the hook was not run");
        let output = format!(
            "{:#}",
            kept.checkpoint("checkpoint/kept")
                .err()
                .context("it was dumped")?
        );
        ensure!(output.contains("FIRN-GPU-HOOK"), "{output}");
        kept.remove()?;
        a.node().run(&["rm", "/run/hook-ran"])?;

        a.configure("")?;
        moves(a, b, &all, &b.uuids()[0])?;
        ensure!(!hook_ran(a) && !hook_ran(b), "the hook was run");
        Ok(())
    })
}

fn no_request_changes_nothing_and_a_bad_one_is_refused(platform: Platform) -> Result<()> {
    on([host(platform, "ak-none", &[SimGpu::h200(1)])?], |[host]| {
        // As images of nvidia/cuda do.
        let image = ["--runtime", FIRN, "--env", "NVIDIA_VISIBLE_DEVICES=all"];
        let plain = Container::run(host, "plain", &image, &["sleep", "1000"])?;
        let written = host.node().read(format!("{BUNDLES}/plain/config.json"))?;
        ensure!(written.starts_with("{\"ociVersion\""), "rewritten: {written}");
        let known = host
            .node()
            .run(&["ctr", "containers", "info", "--spec", "plain"])?
            .stdout;
        let [written, known]: [serde_json::Value; 2] =
            [serde_json::from_str(&written)?, serde_json::from_str(&known)?];
        ensure!(written == known, "{written:#}");
        ensure!(written.pointer("/linux/devices").is_none(), "it has devices");
        plain.remove()?;

        install(host, NEVER, "/usr/local/bin/nvidia-container-cli")?;
        let fails = |gpu: &str, code: &str| {
            // ctr leaves the snapshot of a container that it could not start.
            let id = format!("job-{gpu}");
            let options = ["--runtime", FIRN, "--gpus", gpu];
            let output = Container::run(host, &id, &options, &["sleep", "1000"]);
            let output = format!("{:#}", output.err().context("it was started")?);
            ensure!(output.contains(code) && output.contains("hint: "), "{output}");
            Container::known(host, &id).nothing_left()
        };
        fails(
            "7",
            "FIRN-CDI-DEVICE: cannot give the container the GPUs that it asks for (7)",
        )?;
        host.node().run(&["rm", CDI])?;
        // A hook gives the GPUs as it does without firn.
        install(host, HOOK, "/usr/local/bin/nvidia-container-cli")?;
        let options = ["--runtime", FIRN, "--gpus", "0"];
        let kept = Container::run(host, "kept", &options, &["sleep", "1000"])?;
        ensure!(hook_ran(host), "the hook was not run");
        ensure!(host.log().contains("FIRN-NO-CDI-SPEC"), "no report");
        kept.remove()?;
        // Device nodes stay as they are next to a name that cannot be given.
        host.configure("[create]\nvisible-devices = true\n")?;
        let by_hand = [&image[..], &["--device", "/dev/nvidia0"]].concat();
        Container::run(host, "nodes", &by_hand, &["sleep", "1000"])?.remove()?;
        host.idle()
    })
}

/// A CDI file that gives a disk of the host and its whole root, as one for a backup may.
const BACKUP: &str = r#"{"cdiVersion": "0.6.0", "kind": "vendor.example/backup",
    "devices": [{"name": "host", "containerEdits": {
    "deviceNodes": [{"path": "/dev/backup", "type": "b", "major": 7, "minor": 99}],
    "mounts": [{"hostPath": "/", "containerPath": "/host", "options": ["rbind", "rw"]}]}}]}"#;

/// What an image's variables can do alone, on nodes where the operator lets them count.
fn an_image_requests_no_more_than_the_operator_grants(platform: Platform) -> Result<()> {
    let gpus = [SimGpu::h200(1), SimGpu::h200(2)];
    on([host(platform, "ak-more", &gpus)?], |[host]| {
        host.node().write("/etc/cdi/backup.json", BACKUP)?;
        host.configure("[create]\nvisible-devices = true\n")?;
        let refused = |id: &str, options: &[&str]| {
            let names = [
                "--runtime",
                FIRN,
                "--env",
                "NVIDIA_VISIBLE_DEVICES=0,vendor.example/backup=host",
            ];
            let output = Container::run(host, id, &[&names[..], options].concat(), &["sleep", "1000"]);
            let output = format!("{:#}", output.err().context("it was started")?);
            ensure!(
                output.contains("FIRN-CDI-KIND") && output.contains("hint: "),
                "{output}"
            );
            Container::known(host, id).nothing_left()
        };
        refused("backup", &[])?;

        // Its nodes are its grant, whatever else it names.
        let options = [
            "--runtime",
            FIRN,
            "--device",
            "/dev/nvidia1",
            "--env",
            "NVIDIA_VISIBLE_DEVICES=all",
        ];
        let granted = Container::run(host, "granted", &options, &["sleep", "1000"])?;
        let has = granted.exec(&["sh", "-c", "ls /dev/nvidia*"])?;
        ensure!(has == "/dev/nvidia1\n", "it has {has}");
        ensure!(host.log().contains("FIRN-CDI-GRANT"), "no report");
        granted.remove()?;

        // NVIDIA's hook goes by the settings of NVIDIA's toolkit, and so does firn in its place.
        host.configure("")?;
        as_docker(host)?;
        refused("by-hook", &[])?;
        host.node().write(
            "/etc/nvidia-container-runtime/config.toml",
            "accept-nvidia-visible-devices-envvar-when-unprivileged = false\n",
        )?;
        let options = ["--runtime", FIRN, "--env", "NVIDIA_VISIBLE_DEVICES=all"];
        let hardened = Container::run(host, "hardened", &options, &["sleep", "1000"])?;
        let has = hardened.exec(&["sh", "-c", "ls /dev"])?;
        ensure!(!has.contains("nvidia"), "it has {has}");
        hardened.remove()?;
        host.idle()
    })
}

pub(crate) fn suite() -> matrix::Suite {
    matrix::Suite::new(&cases! {
        firn_cdi_generate_serves_a_node_with_the_driver_alone [FORKY];
        requests_by_hook_and_by_variable_move [FORKY];
        device_nodes_and_privileged_containers_move [FORKY];
        requests_by_nvidias_runtime_move_and_it_is_not_called [FORKY];
        requests_by_the_hook_of_ctr_1_7_move [TRIXIE];
        a_hook_that_mounts_is_replaced_by_its_edits [FORKY];
        no_request_changes_nothing_and_a_bad_one_is_refused [FORKY];
        an_image_requests_no_more_than_the_operator_grants [FORKY];
    })
}
