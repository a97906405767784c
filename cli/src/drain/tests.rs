//! Moves of a job with agents that are directories, and a kubectl that is a script.

use std::fs;

use firn_host::ProblemReport;
use serde_json::{Value, json};

use super::whole::tests::firn_json;
use super::*;

/// Runs what agents are to run in a directory of each. `evict` and `checkpoint` are what the API server and
/// the kubelet do, `pods` is what the API server shows.
const KUBECTL: &str = r#"
root=${0%/*}
case $1 in
create) cat > "$root/eviction"; . "$root/evict"; exit ;;
get) [ -e "$root/pods" ] || { echo 'Unable to connect to the server: EOF' >&2; exit 1; }
    cat "$root/pods"; exit ;;
esac
agent=$5; shift 8; script=$1; shift 2
for path; do
    shift
    case $path in
    /host/*) path=$root/$agent/${path#/host/} ;;
    /proc/*) path=$root/$agent/${path##*/} ;;
    esac
    set -- "$@" "$path"
done
case $script in *ssl_client*) . "$root/checkpoint"; exit ;; esac
sh -euc "$script" agent "$@"
"#;

const CHECKPOINT: &str = r#"
tar -cf "$root/$agent/checkpoints/a.tar" -C "$root/image" .
printf 'HTTP/1.0 200 OK\r\n\r\n{"items": ["/var/lib/kubelet/checkpoints/a.tar"]}'
"#;

const BUDGET: &str = "Error from server (TooManyRequests): Cannot evict pod";
const LOST: &str = "Error from server (Timeout): no answer";

/// A job of node north, and its checkpoint a.tar, which goes to nodes south and west.
struct Cluster {
    dir: tempfile::TempDir,
    drain: Drain,
    job: Job,
}

/// A pod that is the job, or follows it.
fn pod(uid: &str, changes: &[(&str, Value)]) -> Value {
    let mut pod = json!({
        "metadata": {
            "name": "job", "namespace": "ml", "uid": uid, "deletionTimestamp": null,
            "annotations": { "firn.dev/restore-from": "train=moved" },
            "ownerReferences": [{ "kind": "ReplicaSet" }],
        },
        "spec": {
            "nodeName": "north", "runtimeClassName": "firn",
            "containers": [{ "name": "train", "resources": { "limits": { "nvidia.com/gpu": "1" } } }],
        },
        "status": { "phase": "Running", "containerStatuses": [] },
    });
    for (place, value) in changes {
        *pod.pointer_mut(place).unwrap() = value.clone();
    }
    pod
}

impl Cluster {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let script = dir.path().join("kubectl");
        fs::write(&script, KUBECTL).unwrap();
        let agent = |node: &str| {
            for below in ["checkpoints", "named", "restored"] {
                fs::create_dir_all(dir.path().join(node).join(below)).unwrap();
            }
            let (node, pod) = (node.to_owned(), node.to_owned());
            Agent { node, pod }
        };
        let drain = Drain {
            kubectl: Kubectl::of(&script),
            nodes: Vec::new(),
            from: agent("north"),
            to: vec![agent("south"), agent("west")],
            timeout: Duration::from_millis(200),
            as_json: false,
            run: "1".to_owned(),
        };
        let pods = [serde_json::from_value(pod("first", &[])).unwrap()];
        let job = super::pods::jobs(&pods, "north", false).remove(0);
        let cluster = Self { dir, drain, job };
        cluster.image("image", "first");
        cluster.write("checkpoint", CHECKPOINT);
        cluster.pods(&[pod("first", &[])]);
        cluster
    }

    fn write(&self, path: &str, content: &str) {
        fs::write(self.dir.path().join(path), content).unwrap();
    }

    /// A checkpoint, as in an archive.
    fn image(&self, path: &str, log: &str) {
        let inside = self.dir.path().join(path).join("checkpoint");
        fs::create_dir_all(&inside).unwrap();
        let (a, b) = ("a".repeat(10), "bb".to_owned());
        for (name, content) in [
            ("firn.json", firn_json(None)),
            ("a.img", a),
            ("b.img", b),
            ("dump.log", log.to_owned()),
        ] {
            fs::write(inside.join(name), content).unwrap();
        }
    }

    fn pods(&self, pods: &[Value]) {
        self.write("pods", &json!({ "items": pods }).to_string());
    }

    /// What evictions come to: a command of the shell, and an error.
    fn evict(&self, does: &str, error: &str) {
        self.write(
            "evict",
            &format!("{does}\n[ -z '{error}' ] || {{ echo '{error}' >&2; exit 1; }}"),
        );
    }

    fn code(&self) -> String {
        let error = self.drain.try_move(&self.job).map(drop).unwrap_err();
        let report = ProblemReport::from(error);
        format!("{} {}", report.code, report.message)
    }

    /// The nodes' checkpoints.
    fn there(&self) -> Vec<String> {
        let dirs = ["south/named/ml", "west/named/ml", "north/checkpoints"].into_iter();
        let entries = |dir: &str| {
            fs::read_dir(self.dir.path().join(dir))
                .into_iter()
                .flatten()
                .flatten()
        };
        let below =
            |dir: &'static str| entries(dir).map(move |one| format!("{dir}/{}", one.file_name().display()));
        dirs.flat_map(below).collect()
    }
}

#[test]
fn what_the_cpu_of_a_target_lacks_is_seen_there() {
    let mut cluster = Cluster::new();
    let node = |name: &str, driver: &str| -> Node {
        let labels = json!({ "firn.dev/driver": driver });
        serde_json::from_value(json!({ "metadata": { "name": name, "labels": labels }, "spec": {} })).unwrap()
    };
    cluster.drain.nodes = vec![node("north", "1"), node("south", "1"), node("west", "1")];
    let cpu = "model name\t: A\nflags\t\t: fpu avx2 avx512f vaes\nvmx flags\t: avx\nflags\t\t: fpu\n";
    cluster.write("north/cpuinfo", cpu);
    cluster.write("south/cpuinfo", "flags\t\t: fpu avx2 gfni\n");
    // Of a kernel that names nothing.
    cluster.write("west/cpuinfo", "model name\t: C\n");
    let lacking = |cluster: &Cluster| -> Vec<(String, Vec<String>)> {
        let targets = cluster.drain.targets().unwrap();
        let shown = targets
            .iter()
            .map(|target| (target.name().to_owned(), target.lacking.clone()));
        shown.collect()
    };
    let south = ("south".to_owned(), vec!["avx512f".to_owned(), "vaes".to_owned()]);
    assert_eq!(
        lacking(&cluster),
        [south.clone(), ("west".to_owned(), Vec::new())]
    );
    cluster.drain.nodes[2] = node("west", "2");
    assert_eq!(lacking(&cluster), [south]);
    // An agent that cannot look is no node that has everything.
    cluster.drain.nodes[2] = node("west", "1");
    fs::remove_file(cluster.dir.path().join("west/cpuinfo")).unwrap();
    assert!(cluster.drain.targets().is_err());
}

/// The checkpoint of a job that was sent everywhere.
const ALL: [&str; 3] = [
    "south/named/ml/moved",
    "west/named/ml/moved",
    "north/checkpoints/a.tar",
];

#[test]
fn a_job_that_may_not_be_ended_runs_on_without_copies() {
    let cluster = Cluster::new();
    cluster.evict("", BUDGET);
    assert!(cluster.code().starts_with("FIRN-DRAIN-KUBECTL "));
    assert_eq!(cluster.there(), [""; 0]);
}

/// The answer of the API server was lost, and so it was if the same call was made again.
#[test]
fn what_a_job_that_ends_begins_again_from_is_kept() {
    for error in [
        LOST,
        BUDGET,
        "Error from server (NotFound): pods \"job\" not found",
    ] {
        for pods in [
            vec![],
            vec![pod("first", &[("/metadata/deletionTimestamp", json!("now"))])],
            vec![pod("second", &[])],
            vec![pod("first", &[("/status/phase", json!("Failed"))])],
        ] {
            let cluster = Cluster::new();
            cluster.evict("mv \"$root/after\" \"$root/pods\"", error);
            cluster.write("after", &json!({ "items": pods }).to_string());
            let code = cluster.code();
            assert!(!code.starts_with("FIRN-DRAIN-KUBECTL "), "{error} {code}");
            assert_eq!(cluster.there(), ALL, "{error} {code}");
        }
    }
}

#[test]
fn as_long_as_nothing_is_known_of_the_pod_its_checkpoints_are_kept_and_named() {
    for (does, error) in [
        ("", LOST),
        ("", "kubectl was killed"),
        ("rm \"$root/pods\"", BUDGET),
    ] {
        let cluster = Cluster::new();
        cluster.evict(does, error);
        let code = cluster.code();
        assert!(code.starts_with("FIRN-DRAIN-UNKNOWN "), "{code}");
        assert!(code.contains(error), "{code}");
        assert!(
            code.contains("ml/moved on south, ml/moved on west, a.tar on north"),
            "{code}"
        );
        assert_eq!(cluster.there(), ALL);
    }
}

#[test]
fn once_the_job_runs_elsewhere_nothing_is_left_of_it() {
    let mut cluster = Cluster::new();
    cluster.drain.timeout = Duration::from_secs(60);
    let statuses = json!([{ "name": "train", "containerID": "containerd://7", "state": { "running": {} } }]);
    let follows = pod(
        "second",
        &[
            ("/spec/nodeName", json!("west")),
            ("/status/containerStatuses", statuses),
        ],
    );
    cluster.write("after", &json!({ "items": [follows] }).to_string());
    cluster.write("west/restored/7", "");
    cluster.evict("mv \"$root/after\" \"$root/pods\"", LOST);
    let moved = cluster.drain.try_move(&cluster.job).ok().unwrap();
    assert_eq!((&*moved.pod, &*moved.node), ("job", "west"));
    assert_eq!(cluster.there(), [""; 0]);
}

/// The other run has ended the job, and its pod is restored from what that run has put there.
#[test]
fn what_another_run_has_put_there_stays() {
    let cluster = Cluster::new();
    for node in ["south", "west"] {
        cluster.image(&format!("{node}/named/ml/moved"), "of another run");
    }
    cluster.write("checkpoint", "echo 'HTTP/1.0 404 Not Found'; exit 1");
    assert!(cluster.code().starts_with("FIRN-DRAIN-KUBECTL "));
    assert_eq!(cluster.there(), ALL[..2]);
    // And with a checkpoint of this run.
    cluster.write("checkpoint", CHECKPOINT);
    assert!(cluster.code().starts_with("FIRN-DRAIN-NODE "));
    assert_eq!(cluster.there(), ALL[..2]);
    // The other run was first on one of the nodes alone.
    fs::remove_dir_all(cluster.dir.path().join("south/named/ml/moved")).unwrap();
    assert!(cluster.code().starts_with("FIRN-DRAIN-NODE "));
    assert_eq!(cluster.there(), ALL[1..2]);
}

/// Between the look and the name.
#[test]
fn a_name_that_another_run_takes_meanwhile_is_its_own() {
    let cluster = Cluster::new();
    cluster.image("other", "of another run");
    let kubectl = KUBECTL.replace(
        "sh -euc",
        "case $script in mv*) cp -r \"$root/other\" \"$root/$agent/named/ml/moved\" ;; esac; sh -euc",
    );
    cluster.write("kubectl", &kubectl);
    assert!(cluster.code().starts_with("FIRN-DRAIN-NODE "));
    assert_eq!(cluster.there(), ALL[..1]);
    let other = cluster.dir.path().join("south/named/ml/moved/checkpoint");
    assert_eq!(
        fs::read_to_string(other.join("dump.log")).unwrap(),
        "of another run"
    );
    assert_eq!(fs::read_dir(other.parent().unwrap()).unwrap().count(), 1);
}

#[test]
fn a_name_whose_answer_is_lost_is_removed() {
    // Given, or not.
    for mv in ["sh -euc \"$script\" agent \"$@\"; exit 1", "exit 1"] {
        let cluster = Cluster::new();
        let kubectl = KUBECTL.replace("sh -euc", &format!("case $script in mv*) {mv} ;; esac; sh -euc"));
        cluster.write("kubectl", &kubectl);
        assert!(cluster.code().starts_with("FIRN-DRAIN-KUBECTL "), "{mv}");
        assert_eq!(cluster.there(), [""; 0], "{mv}");
    }
}

#[test]
fn nodes_that_share_the_directory_get_one_copy() {
    let cluster = Cluster::new();
    let west = cluster.dir.path().join("west/named");
    fs::remove_dir(&west).unwrap();
    std::os::unix::fs::symlink(cluster.dir.path().join("south/named"), &west).unwrap();
    cluster.evict("rm \"$root/pods\"", LOST);
    let code = cluster.code();
    assert!(code.contains("ml/moved on south, a.tar on north"), "{code}");
}

/// Somebody else has ended the job, and its pod may already be restored from the first copy.
#[test]
fn copies_of_a_job_that_ends_are_kept_if_another_copy_fails() {
    let cluster = Cluster::new();
    fs::remove_dir(cluster.dir.path().join("west/named")).unwrap();
    cluster.write("west/named", "no directory");
    cluster.pods(&[pod("second", &[])]);
    let code = cluster.code();
    assert!(
        code.starts_with("FIRN-DRAIN-UNKNOWN ") && code.contains("ml/moved on south"),
        "{code}"
    );
    let mut there = cluster.there();
    there.sort();
    assert_eq!(there, [ALL[2], ALL[0]]);
    // In the other case nothing is left.
    fs::remove_dir_all(cluster.dir.path().join("south/named/ml")).unwrap();
    cluster.pods(&[pod("first", &[])]);
    assert!(cluster.code().starts_with("FIRN-DRAIN-KUBECTL "));
    assert_eq!(cluster.there(), [""; 0]);
}
