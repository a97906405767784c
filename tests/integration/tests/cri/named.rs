//! Containers that are restored because an annotation of their pod names a checkpoint.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use firn_lab::{LOG, Outcome, failure, saw_object};
use firn_node::wait_for;
use serde_json::{Value, json};

use crate::cri::Point;
use crate::cri::checkpoints::{ARCHIVE, checkpoint, computes};
use crate::cri::client::{Cri, Ctr, Pod};
use crate::cri::pods::SLEEP;
use crate::objects::logs::{self, Reached};
use crate::objects::table::movable;

pub const POINTS: &[Point] = &[
    Point::new(
        "restore by name: replicas with GPUs from one checkpoint",
        "two continue, on both GPUs, with the files",
        replicas,
    )
    .claims("restore by annotation, with GPUs", Outcome::Works)
    .firn_only(),
    Point::new("restore by name: objects of every kind", "all continue", objects).firn_only(),
    Point::new(
        "restore by name: what is not allowed or not there",
        "refused: FIRN-RESTORE-FROM, FIRN-RESTORE-FROM, FIRN-RESTORE-FROM; cold with fallback: true",
        absent,
    )
    .firn_only(),
    Point::new(
        "restore by name: a signed checkpoint",
        "refused: FIRN-SIGNATURE-MISSING; signed for default continues; refused: FIRN-SIGNATURE-NAMESPACE, \
         FIRN-SIGNATURE-NAME, FIRN-SIGNATURE-EXPIRED, FIRN-SIGNATURE-REVOKED, FIRN-SIGNATURE-BAD; cold with \
         fallback: true; refused: FIRN-SIGNATURE-KEY",
        signed,
    )
    .firn_only(),
    Point::new(
        "restore by name: a name in the store",
        "refused: FIRN-RESTORE-FROM, then continues with the files; taken: FIRN-STORE-NAME; gone: \
         FIRN-RESTORE-FROM",
        in_store,
    )
    .firn_only(),
    Point::new(
        "restore by name: a checkpoint that does not fit",
        "refused: FIRN-GPU-COUNT; cold with fallback: true; cut: FIRN-RESTORE-FROM, then cold: true",
        unfit,
    )
    .firn_only(),
    Point::new(
        "restore by name: a container that the kubelet starts again",
        "again continues, cold begins",
        restarts,
    )
    .firn_only(),
];

pub const FROM: &str = "/var/lib/firn/named";
const STORE: &str = "/var/lib/firn/store";
pub const LIMIT: Duration = Duration::from_secs(60);

/// Of minisign.
const SECRET_KEY: &str = "untrusted comment: minisign encrypted secret key
RWQAAEIyAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAGedkKZ9SWsjSn+V8CWy2H8i0bOUrbOoN4ZaN\
VvbPVRsSD8mw7+V4SPXfn/ktiluGomo9cuadmm3oxKkHWbzexao5s7tXLBR/AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=
";
const PUBLIC_KEY: &str = "untrusted comment: minisign public key C85A529F2964E719
RWQZ52Qpn1JayPXfn/ktiluGomo9cuadmm3oxKkHWbzexao5s7tXLBR/
";

/// A counter that has written two files as well as its log, and has a file of the pod's /dev/shm open. The
/// larger has more than half of its layer.
pub fn counter() -> Value {
    counter_after("echo text >/written; seq 20000 >/larger; exec 7<>/dev/shm/open;")
}

/// A counter, after this has run.
pub fn counter_after(script: &str) -> Value {
    let count = format!("{script} exec /bin/gpu-counter --out {LOG} --interval-ms 50 --mib 8");
    json!(["sh", "-c", count])
}

pub fn on_gpu(gpu: u32, command: &Value) -> Value {
    json!({ "command": command, "CDIDevices": [{ "name": format!("nvidia.com/gpu={gpu}") }] })
}

/// What a copy would run if it were not restored: it computes nothing, and shows whether it found the
/// checkpoint's files.
pub fn cold() -> Value {
    json!([
        "sh",
        "-c",
        "if [ -e /written ]; then >/found; else >/cold; fi; exec sleep 1000"
    ])
}

/// Puts a checkpoint of a counter under this name: the kubelet's archive, or where CRI makes none, what ctr
/// makes and the written layer. Returns how far it was at least.
fn keep(cri: Cri<'_>, name: &str) -> Result<u64> {
    let pod = cri.pod_annotated("source", &json!({}))?;
    let container = pod.start_with("c", &on_gpu(0, &counter()))?;
    let before = computes(&container, 3)?;
    keep_of(&pod, &container, name)?;
    Ok(before)
}

/// Puts a checkpoint of this container under this name, and removes its pod.
pub fn keep_of(pod: &Pod<'_>, container: &Ctr<'_>, name: &str) -> Result<()> {
    let cri = pod.cri;
    let node = cri.host.node();
    let dir = format!("{FROM}/default/{name}");
    node.run(&["mkdir", "-p", &dir])?;
    if cri.host.suite().has_cri_checkpoint() {
        checkpoint(container)?;
        node.run(&["tar", "-xf", ARCHIVE, "-C", &dir])?;
        node.run(&["rm", ARCHIVE])?;
    } else {
        let image = format!("{dir}/checkpoint");
        let layer = format!(
            "upper=$(grep '{}/rootfs ' /proc/mounts | grep -o 'upperdir=[^,]*' | cut -d = -f 2); \
             ctr -n k8s.io tasks checkpoint --exit --image-path {image} {}; \
             tar -C $upper -cf {dir}/rootfs-diff.tar .",
            container.id, container.id
        );
        node.run(&["sh", "-ec", &layer])?;
        container.ended()?;
    }
    pod.remove(&[container])
}

/// Runs the story with checkpoints that pods of the namespace `default` may name.
pub fn allowed<T>(cri: Cri<'_>, story: impl FnOnce() -> Result<T>) -> Result<T> {
    cri.host
        .configure(&format!("[restore]\nfrom-dir = \"{FROM}\"\n"))?;
    let done = story();
    cri.host.configure("")?;
    cri.host.node().run(&["rm", "-rf", FROM])?;
    done
}

fn replicas(cri: Cri<'_>) -> Result<String> {
    allowed(cri, || {
        let before = keep(cri, "warm")?;
        let elsewhere = cri.pod("elsewhere")?;
        let other = elsewhere.start("d", SLEEP)?;
        let mut running = Vec::new();
        for gpu in [0, 1] {
            // There is no container d in this pod.
            let annotations = json!({ "firn.dev/restore-from": "c=warm,d=warm" });
            let pod = cri.pod_annotated(&format!("replica-{gpu}"), &annotations)?;
            let copy = pod.start_with("c", &on_gpu(gpu, &cold()))?;
            computes(&copy, before + 2)?;
            let text = copy.exec("cat /written")?;
            ensure!(text.contains("text"), "the written file has {text:?}");
            let (_, audit) = cri
                .host
                .firn_shows(&["audit", "--namespace", "k8s.io", &copy.id])?;
            let audit = audit.to_string();
            for (container, is_named) in [("c", false), ("d", true)] {
                let named = audit.contains(&format!("names container \\\"{container}\\\""));
                ensure!(named == is_named, "{container}: {audit}");
            }
            running.push((pod, copy));
        }
        let memory = cri.host.gpu_memory()?;
        let used = memory.iter().filter(|mib| **mib > 0).count();
        ensure!(used == 2, "GPU memory: {memory:?}");
        for (pod, copy) in running {
            pod.remove(&[&copy])?;
        }
        elsewhere.remove(&[&other])?;
        Ok("two continue, on both GPUs, with the files".to_owned())
    })
}

/// All in one container, each with a process of its own.
fn objects(cri: Cri<'_>) -> Result<String> {
    const OF_POD: &str = "with a GPU, of a pod";
    let objects = movable(cri.host.suite());
    // As CRI names them.
    let add: Vec<&str> = logs::capabilities(&objects)
        .into_iter()
        .filter_map(|capability| capability.strip_prefix("CAP_"))
        .collect();
    let of = |command: &Value| {
        let mut special = on_gpu(0, command);
        special["linux"] = json!({ "securityContext": { "capabilities": { "addCapabilities": add } } });
        special
    };
    allowed(cri, || {
        let pod = cri.pod_annotated("source", &json!({}))?;
        let container = pod.start_with("c", &of(&counter_after(&logs::start(&objects))))?;
        computes(&container, 3)?;
        let show = |container: &Ctr<'_>| container.output(logs::SHOW);
        let before = logs::all_go_on(|| show(&container), &objects, &Reached::new())?;
        keep_of(&pod, &container, "objects")?;
        let pod = cri.pod_annotated("copy", &json!({ "firn.dev/restore-from": "objects" }))?;
        let copy = pod.start_with("c", &of(&cold()))?;
        logs::all_go_on(|| show(&copy), &objects, &before).context("the copy")?;
        pod.remove(&[&copy])?;
        for object in &objects {
            saw_object(object.1, OF_POD, "moves")?;
        }
        Ok("all continue".to_owned())
    })
}

fn falls_back() -> Value {
    json!({ "firn.dev/restore-from": "warm", "firn.dev/restore-fallback": "cold" })
}

/// Starts a container that is refused, and returns the code.
pub fn refused(cri: Cri<'_>, annotations: &Value, special: &Value) -> Result<String> {
    refused_in(&cri.pod_annotated("refused", annotations)?, special)
}

/// The code with which a container of this pod is refused. The pod is removed.
pub fn refused_in(pod: &Pod<'_>, special: &Value) -> Result<String> {
    refused_as(pod, "c", special)
}

/// The same for a container of this name.
pub fn refused_as(pod: &Pod<'_>, name: &str, special: &Value) -> Result<String> {
    let container = pod.create(name, special)?;
    let output = failure(container.start())?;
    pod.remove(&[&container])?;
    let code = output.split(' ').find(|word| word.starts_with("FIRN-"));
    Ok(code.context(output.clone())?.trim_end_matches(':').to_owned())
}

/// Whether a container starts without its checkpoint, and without the checkpoint's files.
pub fn is_cold(cri: Cri<'_>, annotations: &Value, special: &Value) -> Result<bool> {
    let pod = cri.pod_annotated("cold", annotations)?;
    let container = pod.start_with("c", special)?;
    let seen = wait_for("a file of the container", LIMIT, || {
        let seen = container.exec("ls /cold /found /written 2>/dev/null; true")?;
        Ok(seen.contains('/').then_some(seen))
    })?;
    pod.remove(&[&container])?;
    Ok(seen.contains("/cold") && !seen.contains("/found") && !seen.contains("/written"))
}

fn absent(cri: Cri<'_>) -> Result<String> {
    let named = |name: &str| json!({ "firn.dev/restore-from": name });
    let mut codes = vec![refused(cri, &named("warm"), &on_gpu(0, &cold()))?];
    allowed(cri, || {
        // Another namespace has one of that name.
        let others = format!("{FROM}/other/warm/checkpoint");
        cri.host.node().run(&["mkdir", "-p", &others])?;
        codes.push(refused(cri, &named("warm"), &on_gpu(0, &cold()))?);
        cri.host
            .node()
            .run(&["mkdir", "-p", &format!("{FROM}/default")])?;
        codes.push(refused(cri, &named("warm"), &on_gpu(0, &cold()))?);
        let node = cri.host.node();
        let record = "exec ctr -n k8s.io events >/tmp/events";
        let mut recorder = node.spawn(&["sh", "-c", record])?;
        let cold = is_cold(cri, &falls_back(), &on_gpu(0, &cold()))?;
        let seen = wait_for("the event of the fallback", LIMIT, || {
            let events = node.read("/tmp/events")?;
            Ok(events.contains("failed: FIRN-RESTORE-FROM").then_some(events))
        });
        recorder.kill().and_then(|()| recorder.wait().map(drop))?;
        ensure!(seen?.contains("/firn/restore"), "it is of another topic");
        Ok(format!(
            "refused: {}; cold with fallback: {cold}",
            codes.join(", ")
        ))
    })
}

/// The checkpoint is for no namespace but those that its signature names.
fn signed(cri: Cri<'_>) -> Result<String> {
    allowed(cri, || {
        let node = cri.host.node();
        let before = keep(cri, "warm")?;
        let dir = format!("{FROM}/_signed/warm");
        node.run(&[
            "sh",
            "-ec",
            &format!("mkdir -p {FROM}/_signed; mv {FROM}/default/warm {dir}"),
        ])?;
        let keys = "/etc/firn/keys";
        node.write(format!("{keys}/job.pub"), PUBLIC_KEY)?;
        node.write("/etc/firn/job.key", SECRET_KEY)?;
        cri.host.configure(&format!(
            "[restore]\nfrom-dir = \"{FROM}\"\ntrusted-keys = \"{keys}\"\n"
        ))?;
        let code = |annotations: &Value| refused(cri, annotations, &on_gpu(1, &cold()));
        let named = json!({ "firn.dev/restore-from": "c=warm" });
        let missing = code(&named)?;
        let sign = |words: &str| {
            let sign = format!("firn sign {dir} --key /etc/firn/job.key --namespace {words}");
            node.run(&["sh", "-c", &sign]).map(drop)
        };
        sign("default --name warm --until 2999-12-31")?;
        let pod = cri.pod_annotated("signed", &named)?;
        let copy = pod.start_with("c", &on_gpu(1, &cold()))?;
        computes(&copy, before + 2)?;
        let text = copy.exec("cat /written")?;
        ensure!(text.contains("text"), "the written file has {text:?}");
        pod.remove(&[&copy])?;
        let mut others = Vec::new();
        for words in ["other", "default --name warmer", "default --until 2020-12-31"] {
            sign(words)?;
            others.push(code(&named)?);
        }
        sign("default")?;
        let revoke = format!("sha256sum {dir}/checkpoint/firn.json >{keys}/revoked");
        node.run(&["sh", "-ec", &revoke])?;
        others.push(code(&named)?);
        node.run(&["rm", &format!("{keys}/revoked")])?;
        node.run(&["sh", "-ec", &format!("printf x >>{dir}/rootfs-diff.tar")])?;
        let bad = code(&named)?;
        let cold = is_cold(cri, &falls_back(), &on_gpu(1, &cold()))?;
        node.run(&["rm", &format!("{keys}/job.pub")])?;
        let unknown = code(&named)?;
        Ok(format!(
            "refused: {missing}; signed for default continues; refused: {}, {bad}; cold with fallback: \
             {cold}; refused: {unknown}",
            others.join(", ")
        ))
    })
}

/// `firn store name` puts it there, and `from-store` permits it to pods of the namespace.
fn in_store(cri: Cri<'_>) -> Result<String> {
    allowed(cri, || {
        let node = cri.host.node();
        let before = keep(cri, "warm")?;
        let images = format!("[images]\nstore = \"{STORE}\"\n");
        cri.host.configure(&images)?;
        let (from, name) = (format!("{FROM}/default/warm"), ["firn", "store", "name"]);
        node.run(&[&name[..], &[&from, "default/warm"]].concat())?;
        let taken = failure(
            node.run(&[&name[..], &[&from, "default/warm"]].concat())
                .map(drop),
        )?;
        ensure!(taken.contains("FIRN-STORE-NAME"), "{taken}");
        node.run(&["rm", "-r", &from])?;
        let named = json!({ "firn.dev/restore-from": "c=store:warm" });
        let code = || refused(cri, &named, &on_gpu(1, &cold()));
        let off = code()?;
        cri.host
            .configure(&format!("{images}[restore]\nfrom-store = true\n"))?;
        let pod = cri.pod_annotated("stored", &named)?;
        let copy = pod.start_with("c", &on_gpu(1, &cold()))?;
        computes(&copy, before + 2)?;
        let text = copy.exec("cat /written")?;
        ensure!(text.contains("text"), "the written file has {text:?}");
        pod.remove(&[&copy])?;
        node.run(&["rm", "-r", STORE])?;
        let gone = code()?;
        Ok(format!(
            "refused: {off}, then continues with the files; taken: FIRN-STORE-NAME; gone: {gone}"
        ))
    })
}

/// The pod has both GPUs, the checkpoint one.
fn unfit(cri: Cri<'_>) -> Result<String> {
    allowed(cri, || {
        keep(cri, "warm")?;
        let mut special = on_gpu(0, &cold());
        special["CDIDevices"] = json!([{ "name": "nvidia.com/gpu=0" }, { "name": "nvidia.com/gpu=1" }]);
        let code = refused(cri, &json!({ "firn.dev/restore-from": "warm" }), &special)?;
        let by_fallback = is_cold(cri, &falls_back(), &special)?;
        // A layer that was unpacked in part: the kubelet's next attempt has other files.
        let layer = format!("{FROM}/default/warm/rootfs-diff.tar");
        let cut_in_half = format!("truncate --size=$(($(stat -c %s {layer}) / 2)) {layer}");
        cri.host.node().run(&["sh", "-ec", &cut_in_half])?;
        let cut = refused(cri, &falls_back(), &on_gpu(0, &cold()))?;
        let mut next = on_gpu(0, &cold());
        next["annotations"] = json!({ "io.kubernetes.container.restartCount": "1" });
        let is_cold_next = is_cold(cri, &falls_back(), &next)?;
        Ok(format!(
            "refused: {code}; cold with fallback: {by_fallback}; cut: {cut}, then cold: {is_cold_next}"
        ))
    })
}

fn restarts(cri: Cri<'_>) -> Result<String> {
    allowed(cri, || {
        let before = keep(cri, "warm")?;
        let mut special = on_gpu(1, &cold());
        special["annotations"] = json!({ "io.kubernetes.container.restartCount": "1" });
        let again = json!({ "firn.dev/restore-from": "warm", "firn.dev/restore-restarts": "again" });
        let pod = cri.pod_annotated("again", &again)?;
        let copy = pod.start_with("c", &special)?;
        computes(&copy, before + 2)?;
        let has_file = copy.exec("cat /written")?.contains("text");
        ensure!(has_file, "the layer is missing");
        pod.remove(&[&copy])?;
        let cold = json!({ "firn.dev/restore-from": "warm", "firn.dev/restore-restarts": "cold" });
        let begins = is_cold(cri, &cold, &special)?;
        Ok(format!(
            "again continues, cold {}",
            if begins { "begins" } else { "continues" }
        ))
    })
}
