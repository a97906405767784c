//! What happens in the cluster.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use firn_lab::{LOG, Lines, answer};
use firn_node::wait_for;
use serde_json::Value;

use crate::cluster::{Cluster, LIMIT, Member};
use crate::{installed, plugins};

type Story = fn(&Cluster) -> Result<()>;

pub const STORIES: &[(&str, Story)] = &[
    ("a drained job continues on the other node", drain),
    ("what cannot be drained is named and not touched", not_drained),
    (
        "a job whose memory lies in a store, or that writes to a volume, is not ended",
        keep_after_failure,
    ),
    ("a drain that fails costs nothing", failed_drains),
    ("a drain keeps what continues nowhere", late),
    ("the example of a Job is drained as written", job),
    ("the example of a Pod runs as written", pod),
    (
        "the example of a Deployment: four replicas start from one checkpoint",
        replicas,
    ),
    ("each strategy of the device plugin", plugins::strategies),
    ("a lent GPU is given to an urgent pod and back", plugins::lent),
    (
        "a DaemonSet installs, upgrades and removes firn",
        installed::by_daemonset,
    ),
    ("the chart has what kustomize has", installed::by_chart),
];

/// Agents as shipped, but for the image.
const AGENTS: &str = include_str!("../../../../config/kubernetes/agents.yaml");
/// The drainer has the roles of agents.yaml.
const BINDINGS: &str = "
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: drainer}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: firn-drain}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: drainer}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: drainer, namespace: firn-agents}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: firn-drain}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: drainer}]
";
/// Below this directory pods name checkpoints, as agents.yaml has it.
const NAMED: &str = "/var/lib/firn/named";
const CHECKPOINTS: &str = "/var/lib/kubelet/checkpoints";
const PORT: &str = "8080";

const JOB: &str = include_str!("../../../../examples/kubernetes/job.yaml");
const POD: &str = include_str!("../../../../examples/kubernetes/pod.yaml");
const DEPLOYMENT: &str = include_str!("../../../../examples/kubernetes/deployment.yaml");
/// For the images of the examples, which are in a registry.
const TEST_IMAGE: &str = "image: localhost/firn-test:latest\n          imagePullPolicy: Never";

/// A server that answers with the last line of its counter. It starts slowly, unless it is restored.
pub fn deployment(name: &str, replicas: u32, annotations: &str) -> String {
    deployment_on(name, replicas, annotations, "")
}

fn deployment_on(name: &str, replicas: u32, annotations: &str, selector: &str) -> String {
    format!(
        "apiVersion: apps/v1
kind: Deployment
metadata: {{name: {name}}}
spec:
  replicas: {replicas}
  strategy: {{type: Recreate}}
  selector: {{matchLabels: {{app: {name}}}}}
  template:
    metadata:
      labels: {{app: {name}}}
      annotations: {{{annotations}}}
    spec:
      runtimeClassName: firn
      dnsPolicy: Default
      nodeSelector: {{{selector}}}
      terminationGracePeriodSeconds: 1
      containers:
        - name: server
          image: localhost/firn-test:latest
          imagePullPolicy: Never
          command:
            - sh
            - -c
            - |
              printf '#!/bin/sh\\ntail -n 1 {LOG}\\n' >/serve
              chmod +x /serve
              sleep 5
              /bin/gpu-counter --out {LOG} --interval-ms 50 --mib 8 &
              exec nc -ll -p {PORT} -e /serve
          resources: {{limits: {{nvidia.com/gpu: 1}}}}
"
    )
}

/// The pods of a Deployment that run.
pub fn running(cluster: &Cluster, name: &str, count: usize) -> Result<Vec<Value>> {
    wait_for(&format!("{count} pods of {name} that run"), LIMIT, || {
        let pods = cluster.get(&["pods", "--selector", &format!("app={name}")])?;
        let pods = pods["items"].as_array().cloned().unwrap_or_default();
        let runs = |pod: &Value| {
            pod["metadata"]["deletionTimestamp"].is_null()
                && pod["status"]["containerStatuses"][0]["state"]["running"].is_object()
        };
        Ok((pods.len() == count && pods.iter().all(runs)).then_some(pods))
    })
}

/// What the counter of a pod's server answers, once it has gone further than this.
pub fn answers(cluster: &Cluster, pod: &Value, beyond: u64) -> Result<u64> {
    let address = pod["status"]["podIP"]
        .as_str()
        .context("the pod has no address")?;
    wait_for(&format!("an answer beyond {beyond}"), LIMIT, || {
        let ask = ["busybox", "nc", "-w", "2", address, PORT];
        let answer = cluster
            .north
            .run(&ask)
            .map(|answer| answer.stdout)
            .unwrap_or_default();
        let reached = Lines::parse(&answer).reached(1);
        Ok((reached > beyond).then_some(reached))
    })
}

/// That a pod's counter has left out nothing, repeated nothing, and computed right.
pub fn is_right(cluster: &Cluster, pod: &Value) -> Result<()> {
    let name = pod["metadata"]["name"].as_str().unwrap_or_default();
    let lines = Lines::parse(&cluster.kubectl(&["exec", name, "--", "cat", LOG])?);
    match lines.fault_if_carried(1) {
        None => Ok(()),
        Some(fault) => Err(anyhow::anyhow!("{name}: {fault}")),
    }
}

fn node_of(pod: &Value) -> &str {
    pod["spec"]["nodeName"].as_str().unwrap_or_default()
}

/// Lets pods name checkpoints on both nodes, and starts the agents.
fn allow(cluster: &Cluster) -> Result<()> {
    for member in cluster.members() {
        member
            .host
            .configure(&format!("[restore]\nfrom-dir = \"{NAMED}\"\n"))?;
        member.run(&["mkdir", "-p", NAMED])?;
    }
    let agents = AGENTS.replace(
        "image: registry.example/busybox:1.37",
        "image: localhost/firn-test:latest\n          imagePullPolicy: Never",
    );
    cluster.apply(&(agents + BINDINGS))?;
    let rollout = [
        "rollout",
        "status",
        "--namespace",
        "firn-agents",
        "daemonset/firn-agent",
    ];
    cluster
        .kubectl(&[&rollout[..], &["--timeout=60s"]].concat())
        .map(drop)
}

/// Starts a Deployment of one pod on the first node.
fn on_north(cluster: &Cluster, name: &str, annotations: &str) -> Result<Value> {
    on_north_as(cluster, name, &deployment(name, 1, annotations))
}

fn on_north_as(cluster: &Cluster, name: &str, deployment: &str) -> Result<Value> {
    cluster.kubectl(&["cordon", cluster.south.name()])?;
    cluster.apply(deployment)?;
    let pod = running(cluster, name, 1)?.remove(0);
    cluster.kubectl(&["uncordon", cluster.south.name()])?;
    ensure!(
        node_of(&pod) == cluster.north.name(),
        "it is on {}",
        node_of(&pod)
    );
    Ok(pod)
}

/// Removes a Deployment, and waits until its pods are gone.
pub fn remove(cluster: &Cluster, name: &str) -> Result<()> {
    cluster.kubectl(&["delete", "deployment", name])?;
    wait_for(&format!("the end of {name}"), LIMIT, || {
        let pods = cluster.kubectl(&[
            "get",
            "pods",
            "--selector",
            &format!("app={name}"),
            "--output",
            "name",
        ])?;
        Ok(pods.is_empty().then_some(()))
    })
}

/// The files of a directory of a node, also those of its directories.
fn files(member: &Member, dir: &str) -> Result<String> {
    Ok(member.run(&["find", dir, "-type", "f"])?.stdout)
}

fn drain(cluster: &Cluster) -> Result<()> {
    allow(cluster)?;
    let annotations = "firn.dev/restore-from: server=server-moved, firn.dev/restore-fallback: cold";
    let before = on_north(cluster, "server", annotations)?;
    answers(cluster, &before, 5)?;
    let (can, printed) = cluster.drain(&[cluster.north.name(), "--dry-run"])?;
    ensure!(can && printed.contains("can be moved"), "{printed}");
    let reached = answers(cluster, &before, 5)?;
    let (moved, printed) = cluster.drain(&[cluster.north.name()])?;
    println!("{printed}");
    ensure!(moved && printed.contains("continues on south"), "{printed}");
    let after = running(cluster, "server", 1)?.remove(0);
    ensure!(
        node_of(&after) == cluster.south.name(),
        "it is on {}",
        node_of(&after)
    );
    answers(cluster, &after, reached)?;
    is_right(cluster, &after)?;
    let used = cluster.south.host.gpu_memory()?;
    ensure!(
        used.iter().filter(|mib| **mib > 0).count() == 1,
        "GPU memory: {used:?}"
    );
    cluster.north.host.gpu_memory().and_then(|used| {
        ensure!(
            used.iter().all(|mib| *mib == 0),
            "GPU memory on its first node: {used:?}"
        );
        Ok(())
    })?;
    for member in cluster.members() {
        let left = files(member, NAMED)? + &files(member, CHECKPOINTS)?;
        ensure!(left.is_empty(), "{}: left are {left}", member.name());
    }
    // A node that is drained again has nothing to move.
    let (done, printed) = cluster.drain(&[cluster.north.name()])?;
    ensure!(done && printed.contains("0 jobs"), "{printed}");
    cluster.kubectl(&["uncordon", cluster.north.name()])?;
    remove(cluster, "server")
}

fn not_drained(cluster: &Cluster) -> Result<()> {
    allow(cluster)?;
    let pod = on_north(cluster, "plain", "")?;
    let reached = answers(cluster, &pod, 2)?;
    let (moved, printed) = cluster.drain(&[cluster.north.name()])?;
    ensure!(!moved, "it was moved: {printed}");
    for part in ["names no checkpoint for container server", "nothing was touched"] {
        ensure!(printed.contains(part), "not shown is {part:?}: {printed}");
    }
    let node = cluster.get(&["node", cluster.north.name()])?;
    ensure!(node["spec"]["unschedulable"].is_null(), "it is cordoned");
    answers(cluster, &pod, reached)?;
    remove(cluster, "plain")?;
    // A checkpoint that the operator has put there is not written over.
    let dir = format!("{NAMED}/default/warm");
    cluster.south.run(&["mkdir", "-p", &dir])?;
    let pod = on_north(
        cluster,
        "named",
        "firn.dev/restore-from: warm, firn.dev/restore-fallback: cold",
    )?;
    let reached = answers(cluster, &pod, 2)?;
    let (moved, printed) = cluster.drain(&[cluster.north.name()])?;
    ensure!(
        !moved && printed.contains("has a checkpoint default/warm already"),
        "{printed}"
    );
    let (known, printed) = cluster.drain(&["nowhere"])?;
    ensure!(!known && printed.contains("FIRN-DRAIN-NODE"), "{printed}");
    answers(cluster, &pod, reached)?;
    cluster.south.run(&["rmdir", &dir])?;
    remove(cluster, "named")
}

/// Nothing is left of a drain, and the job continues.
fn goes_on_here(cluster: &Cluster, pod: &Value, reached: u64) -> Result<u64> {
    for member in cluster.members() {
        let left = files(member, NAMED)? + &files(member, CHECKPOINTS)?;
        ensure!(left.is_empty(), "{}: left are {left}", member.name());
    }
    answers(cluster, pod, reached)
}

fn keep_after_failure(cluster: &Cluster) -> Result<()> {
    allow(cluster)?;
    let annotations = "firn.dev/restore-from: server=server-moved, firn.dev/restore-fallback: cold";
    // Small memory stays in the image.
    let large = deployment("server", 1, annotations).replace("--mib 8", "--mib 64");
    let pod = on_north_as(cluster, "server", &large)?;
    let reached = answers(cluster, &pod, 2)?;
    for member in cluster.members() {
        member.run(&["mkdir", "-p", "/srv/store"])?;
        member.host.configure(&format!(
            "[restore]\nfrom-dir = \"{NAMED}\"\n[images]\nstore = \"/srv/store\"\nbulk = \"store\"\n"
        ))?;
    }
    fails(cluster, &[], &["FIRN-DRAIN-STORE", "1 of 1 job not moved"])?;
    goes_on_here(cluster, &pod, reached)?;
    remove(cluster, "server")?;
    allow(cluster)?;
    // A directory of the node, of which the copy would find another state.
    let annotations = "firn.dev/restore-from: server=writes-moved, firn.dev/restore-fallback: cold";
    let writes = deployment("writes", 1, annotations).replace(
        "      containers:\n        - name: server\n",
        "      volumes: [{name: data, hostPath: {path: /srv/data, type: DirectoryOrCreate}}]\n      \
         containers:\n        - name: server\n          volumeMounts: [{name: data, mountPath: /data}]\n",
    );
    let pod = on_north_as(cluster, "writes", &writes)?;
    let reached = answers(cluster, &pod, 2)?;
    fails(
        cluster,
        &[],
        &["it may write to volume data", "nothing was touched"],
    )?;
    goes_on_here(cluster, &pod, reached)?;
    let (can, printed) = cluster.drain(&[cluster.north.name(), "--dry-run", "--with-volumes"])?;
    ensure!(can && printed.contains("can be moved"), "{printed}");
    remove(cluster, "writes")
}

/// Shown are these parts, and the drain has failed.
fn fails(cluster: &Cluster, arguments: &[&str], parts: &[&str]) -> Result<()> {
    let (moved, printed) = cluster.drain(&[&[cluster.north.name()], arguments].concat())?;
    ensure!(!moved, "it was moved: {printed}");
    for part in parts {
        ensure!(printed.contains(part), "not shown is {part:?}: {printed}");
    }
    cluster.kubectl(&["uncordon", cluster.north.name()]).map(drop)
}

fn failed_drains(cluster: &Cluster) -> Result<()> {
    allow(cluster)?;
    let annotations = "firn.dev/restore-from: server=server-moved, firn.dev/restore-fallback: cold";
    let pod = on_north(cluster, "server", annotations)?;
    let reached = answers(cluster, &pod, 2)?;
    // The job must not be interrupted.
    cluster.apply(
        "apiVersion: policy/v1\nkind: PodDisruptionBudget\nmetadata: {name: server}\n\
         spec: {minAvailable: 1, selector: {matchLabels: {app: server}}}\n",
    )?;
    wait_for("the budget", LIMIT, || {
        let budget = cluster.get(&["pdb", "server"])?;
        Ok((budget["status"]["currentHealthy"] == 1).then_some(()))
    })?;
    fails(
        cluster,
        &[],
        &["FIRN-DRAIN-KUBECTL", "disruption budget", "1 of 1 job not moved"],
    )?;
    let reached = answers(cluster, &pod, reached)?;
    cluster.kubectl(&["delete", "pdb", "server"])?;
    for member in cluster.members() {
        let left = files(member, NAMED)? + &files(member, CHECKPOINTS)?;
        ensure!(left.is_empty(), "{}: left are {left}", member.name());
    }
    // The other node does not permit restores by name: the job starts cold, and its checkpoint is kept.
    cluster.south.host.configure("")?;
    fails(
        cluster,
        &[],
        &["FIRN-DRAIN-COLD", "default/server-moved is kept there"],
    )?;
    let cold = running(cluster, "server", 1)?.remove(0);
    ensure!(
        node_of(&cold) == cluster.south.name(),
        "it is on {}",
        node_of(&cold)
    );
    allow(cluster)?;
    cluster.kubectl(&["cordon", cluster.north.name()])?;
    let name = cold["metadata"]["name"].as_str().context("a pod has a name")?;
    cluster.kubectl(&["delete", "pod", name])?;
    let restored = running(cluster, "server", 1)?.remove(0);
    answers(cluster, &restored, reached)?;
    is_right(cluster, &restored)?;
    cluster.kubectl(&["uncordon", cluster.north.name()])?;
    remove(cluster, "server")?;
    forget(cluster)
}

/// Nothing but the first node may take the job.
fn late(cluster: &Cluster) -> Result<()> {
    allow(cluster)?;
    let selector = format!("kubernetes.io/hostname: {}", cluster.north.name());
    let pinned = deployment_on(
        "pinned",
        1,
        "firn.dev/restore-from: pinned-moved, firn.dev/restore-fallback: cold",
        &selector,
    );
    let pod = on_north_as(cluster, "pinned", &pinned)?;
    answers(cluster, &pod, 2)?;
    fails(
        cluster,
        &["--timeout", "5"],
        &["FIRN-DRAIN-LATE", "is not scheduled"],
    )?;
    ensure!(
        !files(&cluster.south, NAMED)?.is_empty(),
        "its checkpoint is gone"
    );
    remove(cluster, "pinned")?;
    forget(cluster)
}

/// Removes all checkpoints.
pub fn forget(cluster: &Cluster) -> Result<()> {
    for member in cluster.members() {
        member.run(&["rm", "-rf", &format!("{NAMED}/default")])?;
        member.run(&["find", CHECKPOINTS, "-type", "f", "-delete"])?;
    }
    Ok(())
}

fn job(cluster: &Cluster) -> Result<()> {
    allow(cluster)?;
    cluster.kubectl(&["cordon", cluster.south.name()])?;
    cluster.apply(&JOB.replace("image: registry.example/gpu-counter:latest", TEST_IMAGE))?;
    let reached = |beyond: u64, not: &str| {
        wait_for(&format!("a log beyond {beyond}"), LIMIT, || {
            let pods = cluster.get(&["pods", "--selector", "job-name=train"])?;
            let mut pods = pods["items"].as_array().cloned().unwrap_or_default().into_iter();
            let pod = pods.find(|pod| pod["status"]["phase"] == "Running" && node_of(pod) != not);
            let name = pod.as_ref().and_then(|pod| pod["metadata"]["name"].as_str());
            let Some(name) = name else { return Ok(None) };
            let lines = Lines::parse(&cluster.kubectl(&["logs", name]).unwrap_or_default());
            Ok((lines.reached(1) > beyond).then(|| lines.reached(1)))
        })
    };
    let before = reached(1, "")?;
    cluster.kubectl(&["uncordon", cluster.south.name()])?;
    let (moved, printed) = cluster.drain(&[cluster.north.name(), "--json"])?;
    ensure!(moved && printed.contains("\"moved\""), "{printed}");
    let json = printed.find('{').map_or("", |at| &printed[at..]);
    let shown: Value = serde_json::Deserializer::from_str(json)
        .into_iter()
        .next()
        .context("no JSON")??;
    answer(&["drain"], &shown.to_string())?;
    ensure!(
        shown["jobs"][0]["parts"][0]["checkpoint"] == "train-moved",
        "{shown}"
    );
    ensure!(
        shown["jobs"][0]["moved"]["node"] == cluster.south.name(),
        "{shown}"
    );
    reached(before, cluster.north.name())?;
    let job = cluster.get(&["job", "train"])?;
    ensure!(
        job["status"]["failed"].is_null(),
        "a pod counts as failed: {}",
        job["status"]
    );
    cluster.kubectl(&["uncordon", cluster.north.name()])?;
    cluster
        .kubectl(&["delete", "job", "train", "--cascade=foreground"])
        .map(drop)
}

/// The example of a pod runs as it is.
fn pod(cluster: &Cluster) -> Result<()> {
    let image = TEST_IMAGE.replace("          ", "      ");
    cluster.apply(&POD.replace("image: registry.example/gpu-counter:latest", &image))?;
    wait_for("iterations in the log of the pod", LIMIT, || {
        let log = cluster.kubectl(&["logs", "counter"]).unwrap_or_default();
        Ok((Lines::parse(&log).reached(1) > 2).then_some(()))
    })?;
    cluster.kubectl(&["delete", "pod", "counter", "--now"]).map(drop)
}

fn replicas(cluster: &Cluster) -> Result<()> {
    allow(cluster)?;
    let started = |name: &str, manifest: &str, beyond| -> Result<f64> {
        let begun = Instant::now();
        cluster.apply(manifest)?;
        let pods = running(cluster, name, 4)?;
        for pod in &pods {
            answers(cluster, pod, beyond)?;
        }
        let took = begun.elapsed().as_secs_f64();
        for pod in &pods {
            is_right(cluster, pod)?;
        }
        for member in cluster.members() {
            let used = member.host.gpu_memory()?;
            ensure!(
                used.iter().all(|mib| *mib > 0),
                "{}: GPU memory {used:?}",
                member.name()
            );
        }
        remove(cluster, name)?;
        Ok(took)
    };
    let cold = started("servers", &deployment("servers", 4, ""), 0)?;
    // One is made warm, and its checkpoint put on both nodes.
    let pod = on_north(cluster, "source", "")?;
    let reached = answers(cluster, &pod, 40)?;
    let name = pod["metadata"]["name"].as_str().context("a pod has a name")?;
    let url = format!(
        "/api/v1/nodes/{}/proxy/checkpoint/default/{name}/server",
        cluster.north.name()
    );
    cluster.kubectl(&["create", "--raw", &url, "--filename", "/dev/null"])?;
    let archive = files(&cluster.north, CHECKPOINTS)?;
    let archive = archive.trim();
    cluster
        .south
        .install(cluster.north.path(archive), archive, 0o600)?;
    for member in cluster.members() {
        let dir = format!("{NAMED}/default/warm");
        member.run(&["mkdir", "-p", &dir])?;
        member.run(&["tar", "-xf", archive, "-C", &dir])?;
        member.run(&["rm", archive])?;
    }
    remove(cluster, "source")?;
    // The example as it is, but for its image and what the container would do without a checkpoint.
    let command = "\n          command: [sleep, infinity]";
    let example = DEPLOYMENT.replace(
        "image: registry.example/server:latest",
        &format!("{TEST_IMAGE}{command}"),
    );
    let warm = started("server", &example, reached)?;
    println!("four replicas answer {cold:.1} s after a cold start, {warm:.1} s after a restored one");
    forget(cluster)
}
