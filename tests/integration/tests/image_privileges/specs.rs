//! Specs by which somebody wants more than their container has, through each front end: each is refused, or
//! it is shown that nothing comes of it.
//!
//! The image is a good one, of a container with a GPU. The shim and `firn restore` get the spec from the
//! image, firn-runc from the bundle.

use anyhow::{Context, Result, ensure};
use firn_lab::{Archive, BUNDLES, Container, FIRN, GpuHost, IMAGE, nothing_left, on};
use firn_node::Platform;
use serde_json::Value;

use crate::image_privileges::fronts::{bundle_of, firn_restore, firn_runc, is_refused, lay};
use crate::image_privileges::{GPU, HOSTILE, testbed};

const EVIL: &str = "/srv/evil/criu.conf";
/// Under the name that firn gives its own file in a bundle.
const AS_FIRNS: &str = "/srv/evil/firn-criu.conf";
const OF_A_USER: &str = "/srv/users/criu.conf";
/// What the script would make.
const RAN: &str = "/srv/ran";
const MAP: (&str, &str) = (
    "firn.dev/gpu-map",
    "GPU-5f1e0000-0000-4000-8000-000000000001=GPU-5f1e0000-0000-4000-8000-000000000002",
);
const OF_CONTAINERD: (&str, &str) = ("io.kubernetes.cri.container-type", "container");
const OF_CRIO: (&str, &str) = ("io.kubernetes.cri-o.Metadata", "{}");
const AS_PODMAN: (&str, &str) = ("io.container.manager", "libpod");

#[derive(Clone, Copy)]
enum Answer {
    Refused(&'static str),
    /// It is restored, and none of these annotations is kept.
    Harmless,
}

use Answer::{Harmless, Refused};

struct Hostile {
    what: &'static str,
    annotations: &'static [(&'static str, &'static str)],
    /// Whether the operator lets pods restore.
    cri: bool,
    /// Of the shim, firn-runc, `firn restore`.
    answers: [Answer; 3],
}

const FILE: Answer = Refused("FIRN-CRIU-CONFIG");
const OFF: Answer = Refused("FIRN-RESTORE-CRI");
const NOT_GRANTED: Answer = Refused("FIRN-MAP-UNKNOWN-TARGET");
const KUBELETS: Answer = Refused("FIRN-RESTORE-CLIENT");

const SPECS: &[Hostile] = &[
    Hostile {
        what: "a script for CRIU in what firn noted once",
        annotations: &[("firn.dev/criu-config", EVIL), ("firn.dev/parked", "x")],
        cri: false,
        answers: [Harmless; 3],
    },
    Hostile {
        what: "a script for CRIU in a file that is called as firn's",
        annotations: &[("org.criu.config", AS_FIRNS), ("firn.dev/criu-config", EVIL)],
        cri: false,
        answers: [Harmless; 3],
    },
    Hostile {
        what: "a script for CRIU in a file of root's",
        annotations: &[("org.criu.config", EVIL)],
        cri: false,
        answers: [FILE; 3],
    },
    Hostile {
        what: "a file for CRIU that a user may change",
        annotations: &[("org.criu.config", OF_A_USER)],
        cri: false,
        answers: [FILE; 3],
    },
    Hostile {
        what: "a pod of containerd, where pods may not restore",
        annotations: &[OF_CONTAINERD],
        cri: false,
        answers: [OFF, OFF, KUBELETS],
    },
    Hostile {
        what: "a pod of CRI-O that claims to be podman's, where pods may not restore",
        annotations: &[OF_CRIO, AS_PODMAN],
        cri: false,
        answers: [OFF, OFF, KUBELETS],
    },
    Hostile {
        what: "a pod of containerd that maps itself onto another GPU",
        annotations: &[OF_CONTAINERD, MAP],
        cri: true,
        answers: [NOT_GRANTED, NOT_GRANTED, KUBELETS],
    },
    Hostile {
        what: "a pod of CRI-O that claims to be podman's and maps itself onto another GPU",
        annotations: &[OF_CRIO, AS_PODMAN, MAP],
        cri: true,
        answers: [NOT_GRANTED, NOT_GRANTED, KUBELETS],
    },
];

/// A container continues in its bundle, which has none of the annotations, and nothing has run.
fn nothing_gained(host: &GpuHost, hostile: &Hostile, bundle: &str) -> Result<()> {
    let spec: Value = serde_json::from_str(&host.node().read(format!("{bundle}/config.json"))?)?;
    for (name, value) in hostile.annotations {
        ensure!(spec["annotations"][*name] != *value, "{name} is kept");
    }
    let used = host.gpu_memory()?;
    ensure!(used[0] > 0 && used[1..].iter().all(|mib| *mib == 0), "{used:?}");
    Ok(())
}

fn by_shim(host: &GpuHost, hostile: &Hostile) -> Result<()> {
    let restored = Container::restore(host, "job", HOSTILE, 1);
    match hostile.answers[0] {
        Refused(code) => {
            // ctr leaves the container that it has made for the task.
            let done = restored.map(drop);
            host.node().run(&["ctr", "containers", "delete", "job"])?;
            is_refused(host, code, done)
        }
        Harmless => {
            let (job, _) = restored?;
            job.goes_on(3)?;
            nothing_gained(host, hostile, &format!("{BUNDLES}/job"))?;
            job.remove()
        }
    }
}

fn by_runc(host: &GpuHost, hostile: &Hostile) -> Result<()> {
    let restored = firn_runc(host, GPU, hostile.annotations);
    match hostile.answers[1] {
        Refused(code) => is_refused(host, code, restored),
        Harmless => {
            restored?;
            nothing_gained(host, hostile, &bundle_of(GPU))?;
            host.node().run(&["firn-runc", "delete", "--force", "job"])?;
            Ok(())
        }
    }
}

fn by_command(host: &GpuHost, hostile: &Hostile) -> Result<()> {
    let restored = firn_restore(host);
    match hostile.answers[2] {
        Refused(code) => is_refused(host, code, restored),
        Harmless => {
            restored?;
            nothing_gained(host, hostile, &format!("{BUNDLES}/job"))?;
            let job = Container::known(host, "job").counting(1).moved_before();
            job.goes_on(3)?;
            job.remove()
        }
    }
}

type By = fn(&GpuHost, &Hostile) -> Result<()>;

/// What a spec asks for beyond its container comes to nothing, whatever restores it.
pub fn specs_that_ask_for_more_get_nothing(platform: Platform) -> Result<()> {
    on([testbed(platform, "specs")?], |[host]| {
        let node = host.node();
        node.write("/srv/evil/x.sh", format!("#!/bin/sh\ntouch {RAN}\n"))?;
        node.run(&["chmod", "755", "/srv/evil/x.sh"])?;
        for file in [EVIL, AS_FIRNS] {
            node.write(file, "action-script /srv/evil/x.sh\n")?;
        }
        node.write(OF_A_USER, "tcp-established\n")?;
        node.run(&["chown", "1000", OF_A_USER])?;
        lay(host, GPU, |_| Ok(()))?;
        let fronts: [(&str, By); 3] = [
            ("shim", by_shim),
            ("firn-runc", by_runc),
            ("firn restore", by_command),
        ];
        for hostile in SPECS {
            host.configure(if hostile.cri {
                "[restore]\ncri = true\n"
            } else {
                ""
            })?;
            let mut archive = Archive::export(host, GPU)?;
            archive.describe(IMAGE, FIRN);
            archive.edit_spec(|spec| {
                for (name, value) in hostile.annotations {
                    spec["annotations"][*name] = (*value).into();
                }
            })?;
            archive.import(host, HOSTILE)?;
            for (front, by) in fronts {
                let named = || format!("{}, {front}", hostile.what);
                host.watch_runc()?;
                by(host, hostile).with_context(named)?;
                nothing_left(host, "job").with_context(named)?;
                ensure!(!node.path(RAN).exists(), "{}: the script has run", named());
            }
            host.remove_image(HOSTILE)?;
        }
        // The script is one that CRIU runs.
        node.run(&["mkdir", "-p", "/etc/criu"])?;
        node.run(&["cp", EVIL, "/etc/criu/runc.conf"])?;
        firn_runc(host, GPU, &[])?;
        ensure!(node.path(RAN).exists(), "the script does not run at all");
        node.run(&["firn-runc", "delete", "--force", "job"])?;
        nothing_left(host, "job")
    })
}
