//! A node is broken and repaired.

use anyhow::{Context, Result, ensure};
use firn_lab::{Container, GpuHost, SimGpu, on};
use firn_node::Platform;

use super::{Line, doctor, doctor_through, host};

/// How a node is broken by a script and repaired by another one, and what is to be seen.
struct Break {
    line: Line,
    breaks: &'static str,
    repairs: &'static str,
    /// What calls firn.
    through: &'static str,
}

const fn by(line: Line, breaks: &'static str, repairs: &'static str) -> Break {
    Break {
        line,
        breaks,
        repairs,
        through: "",
    }
}

const fn fail(name: &'static str, found: &'static str, remedy: &'static str) -> Line {
    Line {
        name,
        status: "fail",
        found,
        remedy,
    }
}

const fn warn(name: &'static str, found: &'static str, remedy: &'static str) -> Line {
    Line {
        status: "warn",
        ..fail(name, found, remedy)
    }
}

/// Puts a script of another release in the place of a program.
macro_rules! other_release {
    ($path:literal, $shown:literal) => {
        concat!(
            "[ ! -e ",
            $path,
            " ] || mv ",
            $path,
            " /srv/kept; printf '#!/bin/sh\\necho ",
            $shown,
            "\\n' >",
            $path,
            "; chmod 755 ",
            $path
        )
    };
}

macro_rules! back {
    ($path:literal) => {
        concat!("rm -f ", $path, "; [ ! -e /srv/kept ] || mv /srv/kept ", $path)
    };
}

macro_rules! away {
    ($path:literal) => {
        concat!("mv ", $path, " /srv/kept")
    };
}

const BREAKS: &[Break] = &[
    by(
        fail(
            "config",
            "line 2: restore.gpu: unknown key `gpu`",
            "correct line 2, then `firn config check`",
        ),
        "printf '[restore]\\ngpu = 1\\n' >/etc/firn/config.toml",
        "rm /etc/firn/config.toml",
    ),
    by(
        fail(
            "named gpus",
            "[restore] gpus names GPU 7",
            "line 2; `nvidia-smi -L`",
        ),
        "printf '[restore]\\ngpus = [\"7\"]\\n' >/etc/firn/config.toml",
        "rm /etc/firn/config.toml",
    ),
    by(
        fail("criu libs", "/none is no directory", "`firn config check`"),
        "printf '[criu]\\nlibs-dir = \"/none\"\\n' >/etc/firn/config.toml",
        "rm /etc/firn/config.toml",
    ),
    by(
        fail("store", "FIRN-STORE-UNUSABLE", ""),
        "touch /srv/store; printf '[images]\\nstore = \"/srv/store\"\\n' >/etc/firn/config.toml",
        "rm /etc/firn/config.toml /srv/store",
    ),
    Break {
        through: "setpriv --bounding-set=-sys_ptrace",
        ..by(
            fail("root", "root without CAP_SYS_PTRACE", "`capsh --print`"),
            "true",
            "true",
        )
    },
    Break {
        through: "setpriv --reuid=65534 --clear-groups",
        ..by(
            fail("root", "this is not root", "`sudo firn doctor`"),
            "true",
            "true",
        )
    },
    by(
        fail("cgroups", "no cgroup v2", "`mount -t cgroup2"),
        "mkdir -p /srv/empty; mount --bind /srv/empty /sys/fs/cgroup",
        "umount /sys/fs/cgroup",
    ),
    by(
        fail("shim", "io.containerd.firn.v2 is no program", "`firn install`"),
        away!("/usr/local/bin/containerd-shim-firn-v2"),
        back!("/usr/local/bin/containerd-shim-firn-v2"),
    ),
    by(
        fail("shim", "firn 0.0.9, and this is", "`firn install --from DIR`"),
        other_release!(
            "/usr/local/bin/containerd-shim-firn-v2",
            "containerd-shim-firn-v2:\\necho Version: 0.0.9"
        ),
        back!("/usr/local/bin/containerd-shim-firn-v2"),
    ),
    by(
        warn(
            "shim",
            "hides /usr/bin/containerd-shim-firn-v2 0.0.9",
            "`rm /usr/bin/containerd-shim-firn-v2`",
        ),
        other_release!(
            "/usr/bin/containerd-shim-firn-v2",
            "containerd-shim-firn-v2:\\necho Version: 0.0.9"
        ),
        back!("/usr/bin/containerd-shim-firn-v2"),
    ),
    by(
        fail(
            "stock shim",
            "io.containerd.runc.v2 is /usr/local/bin/containerd-shim-runc-v2, firn 0.0.9",
            "`firn install",
        ),
        other_release!(
            "/usr/local/bin/containerd-shim-runc-v2",
            "containerd-shim-firn-v2:\\necho Version: 0.0.9"
        ),
        back!("/usr/local/bin/containerd-shim-runc-v2"),
    ),
    by(
        fail(
            "firn-gpu",
            "firn-gpu is firn-gpu 0.0.9",
            "`firn install --from DIR`",
        ),
        other_release!("/usr/local/bin/firn-gpu", "firn-gpu 0.0.9"),
        back!("/usr/local/bin/firn-gpu"),
    ),
    by(
        fail("firn-hook", "FIRN-PROGRAM-MISSING", "install firn's programs"),
        away!("/usr/local/bin/firn-hook"),
        back!("/usr/local/bin/firn-hook"),
    ),
    by(
        fail(
            "firn-runc",
            "firn-runc is firn-runc 0.0.9",
            "`firn install --from DIR`",
        ),
        other_release!("/usr/local/bin/firn-runc", "firn-runc 0.0.9"),
        back!("/usr/local/bin/firn-runc"),
    ),
    by(
        warn(
            "criu plugin",
            "libfirn_criu.so is missing",
            "install firn's libfirn_criu.so",
        ),
        away!("/usr/local/bin/libfirn_criu.so"),
        back!("/usr/local/bin/libfirn_criu.so"),
    ),
    by(
        warn(
            "cuda library",
            "libfirn_cuda.so is missing",
            "install firn's libfirn_cuda.so",
        ),
        away!("/usr/local/bin/libfirn_cuda.so"),
        back!("/usr/local/bin/libfirn_cuda.so"),
    ),
    by(
        fail("runc", "no runc in PATH", "`apt install runc`"),
        away!("/usr/sbin/runc"),
        back!("/usr/sbin/runc"),
    ),
    by(
        fail("criu", "no criu in PATH", "`apt install criu`"),
        away!("/usr/sbin/criu"),
        back!("/usr/sbin/criu"),
    ),
    by(
        warn(
            "criu",
            "it loads no plugin of firn (4.0 does)",
            "CRIU 4.2 or later",
        ),
        other_release!("/usr/local/sbin/criu", "Version: 3.19"),
        back!("/usr/local/sbin/criu"),
    ),
    by(
        warn("criu", "`criu check` fails: no timens", "`criu check --all`"),
        "printf '#!/bin/sh\\n[ $1 = check ] || exec /usr/sbin/criu $@\\necho no timens >&2; exit 1\\n' \
         >/usr/local/sbin/criu; chmod 755 /usr/local/sbin/criu",
        "rm /usr/local/sbin/criu",
    ),
    by(
        warn("iptables", "no iptables-restore", "`apt install iptables`"),
        away!("/usr/sbin/iptables-restore"),
        back!("/usr/sbin/iptables-restore"),
    ),
    by(
        warn("cdi", "no CDI file for nvidia.com/gpu", "`firn cdi generate"),
        away!("/etc/cdi/nvidia.json"),
        back!("/etc/cdi/nvidia.json"),
    ),
    by(
        warn("cdi", "broken.yaml is not used", "`firn cdi list`"),
        "echo 'kind: nvidia.com/gpu' >/etc/cdi/broken.yaml",
        "rm /etc/cdi/broken.yaml",
    ),
    by(
        fail(
            "cdi",
            "/etc/cdi/nvidia.json is stale: it names /usr/lib/",
            "cdi generate --output",
        ),
        "cp /etc/cdi/nvidia.json /srv/kept; \
         sed -i 's,\"hostPath\": *\"/[^\"]*/libcuda,&.of-before,' /etc/cdi/nvidia.json",
        "mv /srv/kept /etc/cdi/nvidia.json",
    ),
    by(
        warn(
            "mps",
            "the MPS daemon runs",
            "`echo quit | nvidia-cuda-mps-control`",
        ),
        "printf '#!/bin/sh\\nwhile :; do sleep 1; done\\n' >/srv/nvidia-cuda-mps-control; \
         chmod 755 /srv/nvidia-cuda-mps-control; \
         setsid /srv/nvidia-cuda-mps-control >/dev/null 2>&1 & echo $! >/srv/mps.pid",
        "kill -9 $(cat /srv/mps.pid)",
    ),
    by(
        fail(
            "driver",
            "cannot open libnvidia-ml.so.1",
            "install the NVIDIA driver",
        ),
        "find /usr -xdev -name 'libnvidia-ml.so*' | while read f; do \
         mkdir -p /srv/lib$(dirname $f); mv $f /srv/lib$f; done; ldconfig",
        "cp -a /srv/lib/usr/. /usr; rm -r /srv/lib; ldconfig",
    ),
    by(
        warn("images", "others can READ it", "`rm -r DIR`"),
        "mkdir -m 755 /tmp/ctrd-checkpoint7; echo x >/tmp/ctrd-checkpoint7/pages-1.img",
        "rm -r /tmp/ctrd-checkpoint7",
    ),
    by(
        fail(
            "docker",
            "docker --runtime firn: /none/firn is no program",
            "`firn install`",
        ),
        "mkdir -p /etc/docker; echo '{\"runtimes\": {\"firn\": {\"path\": \"/none/firn\"}}}' \
         >/etc/docker/daemon.json; printf '#!/bin/sh\\n' >/usr/local/bin/docker; \
         chmod 755 /usr/local/bin/docker",
        "rm -r /etc/docker /usr/local/bin/docker",
    ),
    by(
        fail("podman", "none of /none/firn-runc is there", "`firn install`"),
        "mkdir -p /etc/containers; printf '[engine.runtimes]\\nfirn-runc = [\"/none/firn-runc\"]\\n' \
         >/etc/containers/containers.conf; printf '#!/bin/sh\\n' >/usr/local/bin/podman; \
         chmod 755 /usr/local/bin/podman",
        "rm -r /etc/containers /usr/local/bin/podman",
    ),
    by(
        warn(
            "handlers",
            "the kubelet has no handler",
            "`firn install --containerd --restart`",
        ),
        "printf '#!/bin/sh\\n' >/usr/local/bin/kubelet; chmod 755 /usr/local/bin/kubelet",
        "rm /usr/local/bin/kubelet",
    ),
];

fn run(host: &GpuHost, script: &str) -> Result<()> {
    host.node().run(&["sh", "-c", script]).map(drop)
}

fn is_good(host: &GpuHost) -> Result<()> {
    let bad: Vec<_> = doctor(host, "")?
        .into_iter()
        .filter(|check| check["status"] != "ok")
        .collect();
    ensure!(bad.is_empty(), "the node is not good: {bad:#?}");
    Ok(())
}

/// Other GPUs, another driver, and a GPU whose memory has no room.
fn gpus(host: &mut GpuHost) -> Result<()> {
    host.replace_gpus(&[SimGpu::h200(1).mig()], "570.86.10")?;
    let checks = doctor(host, "")?;
    warn("driver", "restores onto the same GPUs only", "driver 580").expect(&checks)?;
    warn("gpu", "in MIG mode", "`nvidia-smi -i 0 -mig 0`").expect(&checks)?;
    let uuid = SimGpu::h200(1).uuid;
    let setup =
        format!("simgpu teardown; simgpu setup --driver 580.159.04 --gpu uuid={uuid},persistence=off");
    run(host, &setup)?;
    warn("gpu", "persistence mode is off", "`nvidia-smi -pm 1`").expect(&doctor(host, "")?)?;
    run(host, "rm /dev/nvidia0")?;
    let checks = doctor(host, "")?;
    fail("gpu", "none found", "`nvidia-smi -L`").expect(&checks)?;
    fail(
        "cdi",
        "it names /dev/nvidia0, which is not there",
        "cdi generate --output",
    )
    .expect(&checks)?;
    host.replace_gpus(&[SimGpu::h200(1), SimGpu::h200(2)], firn_lab::DRIVER)?;
    let job = Container::count(host, "job", &["0"], 1, &[])?;
    job.goes_on(1)?;
    run(host, "mount -t tmpfs -o size=64k tiny /tmp")?;
    let room = warn("room", "and /tmp, where images are made", "`df -h /tmp`");
    let checks = doctor(host, "");
    run(host, "umount /tmp")?;
    room.expect(&checks?)?;
    job.remove()?;
    is_good(host)
}

pub fn each_broken_part_is_named_with_its_remedy(platform: Platform) -> Result<()> {
    on([host(platform, "dr-b")?], |[host]| {
        run(host, "mkdir -p /etc/firn")?;
        is_good(host)?;
        for Break {
            line,
            breaks,
            repairs,
            through,
        } in BREAKS
        {
            run(host, breaks).with_context(|| format!("break {line:?}"))?;
            let checks = doctor_through(host, through, "");
            run(host, repairs).with_context(|| format!("repair {line:?}"))?;
            line.expect(&checks?)?;
            let after = doctor(host, "")?;
            ensure!(!line.is_among(&after), "{line:?} after its repair");
        }
        is_good(host)?;
        gpus(host)?;
        host.idle()
    })
}

/// Handlers are those of the configuration with its imports, which may be broken, or not yet be in force.
pub fn what_containerd_starts_is_seen_through_its_configuration(platform: Platform) -> Result<()> {
    on([host(platform, "dr-c")?], |[host]| {
        const CONFIG: &str = "/etc/containerd/config.toml";
        host.serve_kubernetes()?;
        run(host, &format!("cp {CONFIG} /srv/config.toml; mkdir -p /srv/more"))?;
        let plugin = if host.suite().ctr_knows_cdi() {
            "io.containerd.cri.v1.runtime"
        } else {
            "io.containerd.grpc.v1.cri"
        };
        let version = if host.suite().ctr_knows_cdi() { 3 } else { 2 };
        let handler = |path: &str| {
            let table = format!("[plugins.\"{plugin}\".containerd.runtimes.firn]");
            let text = format!(
                "version = {version}\n{table}\nruntime_type = \"io.containerd.firn.v2\"\n\
                 runtime_path = \"{path}\"\n"
            );
            host.node().write("/srv/more/a.toml", text)
        };
        run(
            host,
            &format!("sed -i '/^imports/d; 1i imports = [\"/srv/more/*.toml\"]' {CONFIG}"),
        )?;
        handler("/none")?;
        let checks = doctor(host, "")?;
        fail(
            "handlers",
            "handler firn: /none is no program",
            "`firn install --containerd --restart`",
        )
        .expect(&checks)?;
        warn(
            "containerd",
            "it runs since before",
            "`systemctl restart containerd`",
        )
        .expect(&checks)?;
        handler("/usr/bin/containerd-shim-runc-v2")?;
        let checks = doctor(host, "")?;
        fail("handlers", "which is not firn's", "`firn install`").expect(&checks)?;
        handler("/usr/local/bin/containerd-shim-firn-v2")?;
        let checks = doctor(host, "")?;
        let good = checks.iter().any(|check| {
            check["name"] == "handlers"
                && check["status"] == "ok"
                && check["found"].to_string().contains("handler firn")
        });
        ensure!(good, "{checks:#?}");
        run(host, &format!("echo 'x = [' >>{CONFIG}"))?;
        fail("containerd", "cannot be read", "config dump` checks it").expect(&doctor(host, "")?)?;
        run(host, &format!("cp /srv/config.toml {CONFIG}"))?;
        host.node().kill_containerd()?;
        warn("containerd", "it does not run", "`systemctl start containerd`").expect(&doctor(host, "")?)?;
        host.node().start_containerd()?;
        host.idle()
    })
}
