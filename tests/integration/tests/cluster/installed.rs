//! firn comes onto the nodes by a DaemonSet, is upgraded under a running pod, and goes.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use firn_lab::{Built, PROGRAMS};
use firn_node::{Image, go_install, wait_for};
use serde_json::Value;

use crate::cluster::{Cluster, LIMIT, Member, RUNTIME_CLASS};
use crate::stories::{answers, deployment, is_right, remove, running};

const IMAGE: &str = "localhost/firn";
/// Where the shipped files are on the first node.
const CONFIG: &str = "/tmp/config/kubernetes";
const HELM: (&str, &str) = ("helm.sh/helm/v3/cmd/helm", "v3.19.2");
const RUNTIME: &str = "firn.dev/runtime";
const SHIM: &str = "/usr/local/bin/containerd-shim-firn-v2";

/// An image as config/Containerfile makes it, with a shim that may be another file.
fn image(tag: &str, shim: &Path) -> Result<Image> {
    let built = Built::for_tests()?;
    let image = Image::new(format!("{IMAGE}:{tag}"))
        .entrypoint("/firn")
        .command(&[]);
    let image = image.program(built.program("firn"), "/firn");
    Ok(PROGRAMS.into_iter().fold(image, |image, name| {
        let file = if name == PROGRAMS[0] {
            shim.to_owned()
        } else {
            built.program(name)
        };
        image.program(file, format!("/release/{name}"))
    }))
}

/// A shipped manifest as tests can use it: the nodes have no systemd, and no registry.
fn write_shipped(cluster: &Cluster, tag: &str) -> Result<()> {
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../config/kubernetes");
    for dir in ["install", "remove"] {
        for entry in fs::read_dir(shipped.join(dir))? {
            let entry = entry?;
            let text = fs::read_to_string(entry.path())?
                .replace(", --restart]", ", --every=2]")
                .replace(
                    "newName: registry.example/firn, newTag: 0.1.0",
                    &format!("newName: {IMAGE}, newTag: {tag}"),
                )
                .replace(
                    "image: registry.example/firn:0.1.0",
                    "image: registry.example/firn:0.1.0\n          imagePullPolicy: Never",
                );
            let name = entry.file_name().to_string_lossy().into_owned();
            cluster.north.write(format!("{CONFIG}/{dir}/{name}"), text)?;
        }
    }
    Ok(())
}

fn apply(cluster: &Cluster, dir: &str) -> Result<()> {
    cluster
        .kubectl(&["apply", "--kustomize", &format!("{CONFIG}/{dir}")])
        .map(drop)
}

/// Waits until a label of the node has the value, or is not there.
fn expect_label(cluster: &Cluster, member: &Member, label: &str, value: Option<&str>) -> Result<()> {
    wait_for(
        &format!("{} to have {label}={value:?}", member.name()),
        LIMIT,
        || {
            let node = cluster.get(&["node", member.name()])?;
            Ok((node["metadata"]["labels"][label].as_str() == value).then_some(()))
        },
    )
}

/// Waits until the log of the node's agent has this.
fn agent_prints(cluster: &Cluster, member: &Member, wanted: &str) -> Result<()> {
    wait_for(
        &format!("{wanted:?} of the agent on {}", member.name()),
        LIMIT,
        || {
            let pods = cluster.get(&[
                "pods",
                "--namespace",
                "firn-install",
                "--selector",
                "app=firn-node",
            ])?;
            let pods = pods["items"].as_array().cloned().unwrap_or_default();
            let here = pods.iter().filter(|pod| pod["spec"]["nodeName"] == member.name());
            let names = here.filter_map(|pod| pod["metadata"]["name"].as_str());
            let logs = names.map(|name| cluster.kubectl(&["logs", "--namespace", "firn-install", name]));
            Ok(logs.flatten().any(|log| log.contains(wanted)).then_some(()))
        },
    )
}

/// Removes firn from the nodes, which are tests' own, and keeps it for [`put_back`].
fn take_away(cluster: &Cluster) -> Result<()> {
    cluster.kubectl(&["delete", "runtimeclass", "firn"])?;
    for member in cluster.members() {
        member.run(&["mkdir", "-p", "/opt/keep"])?;
        for program in PROGRAMS {
            member.run(&["cp", &format!("/usr/local/bin/{program}"), "/opt/keep"])?;
        }
        member.run(&["/opt/keep/firn", "uninstall"])?;
        member.restart_containerd()?;
    }
    Ok(())
}

fn put_back(cluster: &Cluster) -> Result<()> {
    for member in cluster.members() {
        member.run(&["/opt/keep/firn", "install", "--containerd"])?;
        member.restart_containerd()?;
    }
    cluster.apply(RUNTIME_CLASS)
}

pub fn by_daemonset(cluster: &Cluster) -> Result<()> {
    take_away(cluster)?;
    let work = tempfile::tempdir()?;
    let (first, next) = (Built::for_tests()?.shim(), work.path().join("shim"));
    fs::write(&next, [&fs::read(first)?[..], b"x"].concat())?;
    for (tag, shim) in [("v1", first), ("v2", &next)] {
        let image = image(tag, shim)?;
        for member in cluster.members() {
            image.import_into(member, "k8s.io")?;
        }
    }
    write_shipped(cluster, "v1")?;
    apply(cluster, "install")?;
    for member in cluster.members() {
        expect_label(cluster, member, RUNTIME, Some("restart-containerd"))?;
        member.restart_containerd()?;
        expect_label(cluster, member, RUNTIME, Some("ready"))?;
        expect_label(cluster, member, "firn.dev/driver", Some("580.159.04"))?;
        expect_label(cluster, member, "firn.dev/gpu-model", Some("NVIDIA-H200"))?;
        expect_label(cluster, member, "firn.dev/remap", Some("true"))?;
    }
    cluster.apply(&deployment("served", 1, ""))?;
    let pod = running(cluster, "served", 1)?.remove(0);
    let reached = answers(cluster, &pod, 2)?;

    write_shipped(cluster, "v2")?;
    apply(cluster, "install")?;
    for member in cluster.members() {
        wait_for("the next release", LIMIT, || {
            let here = fs::metadata(member.path(SHIM))?.len();
            Ok((here == fs::metadata(&next)?.len()).then_some(()))
        })?;
        expect_label(cluster, member, RUNTIME, Some("ready"))?;
    }
    answers(cluster, &pod, reached + 2)?;
    goes(cluster, &pod)?;
    put_back(cluster)
}

/// firn leaves the nodes, the one with the pod once that has ended.
fn goes(cluster: &Cluster, pod: &Value) -> Result<()> {
    let reached = answers(cluster, pod, 0)?;
    apply(cluster, "remove")?;
    for member in cluster.members() {
        expect_label(cluster, member, RUNTIME, None)?;
        expect_label(cluster, member, "firn.dev/version", None)?;
        if pod["spec"]["nodeName"] == member.name() {
            agent_prints(cluster, member, "FIRN-INSTALL-IN-USE")?
        } else {
            agent_prints(cluster, member, "firn is removed")?
        }
    }
    answers(cluster, pod, reached + 2)?;
    is_right(cluster, pod)?;
    remove(cluster, "served")?;
    for member in cluster.members() {
        agent_prints(cluster, member, "firn is removed")?;
        ensure!(
            !member.path(SHIM).exists(),
            "the shim is left on {}",
            member.name()
        );
        let dump = member.run(&["containerd", "config", "dump"])?.stdout;
        ensure!(
            !dump.contains("runtimes.firn]"),
            "the handler is left on {}",
            member.name()
        );
    }
    cluster
        .kubectl(&["delete", "--kustomize", &format!("{CONFIG}/remove")])
        .map(drop)
}

/// The objects of the chart are those of kustomize.
pub fn by_chart(cluster: &Cluster) -> Result<()> {
    let (package, version) = HELM;
    let helm = go_install(package, version)?;
    let chart = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../config/helm/firn");
    for (dir, options) in [("install", &[][..]), ("remove", &["--set", "remove=true"])] {
        let mut template = std::process::Command::new(&helm);
        template
            .args(["template", "firn"])
            .arg(&chart)
            .args(["--namespace", "firn-install"])
            .args(options);
        let rendered = template.output().context("run helm")?;
        ensure!(
            rendered.status.success(),
            "helm: {}",
            String::from_utf8_lossy(&rendered.stderr)
        );
        let kubernetes = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../config/kubernetes");
        cluster.north.run(&["rm", "-rf", "/tmp/shipped"])?;
        for dir in ["install", "remove"] {
            for entry in fs::read_dir(kubernetes.join(dir))? {
                let entry = entry?;
                let name = entry.file_name().to_string_lossy().into_owned();
                cluster
                    .north
                    .write(format!("/tmp/shipped/{dir}/{name}"), fs::read(entry.path())?)?;
            }
        }
        let shipped = cluster.kubectl(&["kustomize", &format!("/tmp/shipped/{dir}")])?;
        let (chart, shipped) = (
            objects(cluster, &rendered.stdout)?,
            objects(cluster, shipped.as_bytes())?,
        );
        ensure!(
            chart == shipped,
            "{dir}: the chart has {chart:#?}\nkustomize has {shipped:#?}"
        );
    }
    Ok(())
}

/// The objects of these manifests, without the namespace, which a chart leaves to its user.
fn objects(cluster: &Cluster, manifests: &[u8]) -> Result<Vec<String>> {
    cluster.north.write("/tmp/objects.yaml", manifests)?;
    let read = [
        "create",
        "--dry-run=client",
        "--output",
        "json",
        "--filename",
        "/tmp/objects.yaml",
    ];
    let printed = cluster.kubectl(&read)?;
    let mut objects = Vec::new();
    for object in serde_json::Deserializer::from_str(&printed).into_iter::<Value>() {
        let mut object = object?;
        if object["kind"] == "Namespace" {
            continue;
        }
        let container = object.pointer_mut("/spec/template/spec/containers/0");
        if let Some(container) = container.and_then(Value::as_object_mut) {
            container.remove("imagePullPolicy");
        }
        objects.push(serde_json::to_string_pretty(&object)?);
    }
    objects.sort();
    Ok(objects)
}
