//! The rights that the shipped manifests give.

#![allow(clippy::unwrap_used, reason = "a failed invariant fails the test")]

use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;

/// Directories of a node that pods without privileges may have.
const OWN: [&str; 3] = ["/var/lib/kubelet/checkpoints", "/var/lib/firn/", "/run/firn/"];

/// Where an image comes from that everybody replaces by an own one.
const PLACEHOLDER: &str = "registry.example/";

fn yaml_files(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        match path.extension().and_then(|ending| ending.to_str()) {
            None if path.is_dir() => yaml_files(&path, found),
            Some("yaml") => found.push(path),
            _ => {}
        }
    }
}

/// A template of Helm's with values that do not matter here.
fn rendered(text: &str) -> String {
    let text = text.replace("{{ .Release.Namespace }}", "firn-install");
    let text = text.replace("{{ .Values.image.repository }}", "registry.example/firn");
    let mut is_left_out = false;
    let is_taken = |line: &&str| {
        let line = line.trim_start();
        // Of two images the one without a digest.
        is_left_out = line == "{{- if .Values.image.digest }}" || is_left_out && line != "{{- else }}";
        !is_left_out && !line.starts_with("{{")
    };
    let lines = text
        .lines()
        .filter(is_taken)
        .map(|line| match line.split_once("{{") {
            // The rest of a value, or all of it.
            Some((before, after)) => format!(
                "{before}x{}",
                after.rsplit_once("}}").map_or("", |(_, rest)| rest)
            ),
            None => line.to_owned(),
        });
    lines.collect::<Vec<_>>().join("\n")
}

/// All objects that are shipped, with the file that has them.
fn shipped() -> Vec<(String, Value)> {
    let config = Path::new(env!("CARGO_MANIFEST_DIR")).join("../config");
    let mut files = Vec::new();
    for dir in ["kubernetes", "helm/firn/templates"] {
        yaml_files(&config.join(dir), &mut files);
    }
    let mut objects = Vec::new();
    for file in files {
        let name = file.strip_prefix(&config).unwrap().display().to_string();
        let mut text = fs::read_to_string(&file).unwrap();
        if name.starts_with("helm") {
            let begin = text.find("apiVersion").unwrap();
            text = rendered(&text[begin..]);
        }
        for document in serde_yaml_ng::Deserializer::from_str(&text) {
            let object =
                Value::deserialize(document).unwrap_or_else(|error| panic!("{name}: {error}\n{text}"));
            objects.push((name.clone(), object));
        }
    }
    objects
}

fn texts(value: &Value) -> Vec<&str> {
    value
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect()
}

/// What is wrong with these objects.
#[allow(clippy::too_many_lines, reason = "a list of rules")]
fn faults(objects: &[(String, Value)]) -> Vec<String> {
    let mut faults = Vec::new();
    let workloads = || {
        objects
            .iter()
            .filter(|(_, one)| !one["spec"]["template"].is_null())
    };
    let is_privileged = |one: &Value| {
        let pod = &one["spec"]["template"]["spec"];
        let of_node = ["hostPID", "hostNetwork", "hostIPC"]
            .iter()
            .any(|key| pod[key] == true);
        let containers = pod["containers"].as_array().into_iter().flatten();
        of_node
            || containers
                .into_iter()
                .any(|one| one["securityContext"]["privileged"] == true)
    };
    for (file, one) in objects {
        let (kind, namespace) = (one["kind"].as_str().unwrap_or(""), &one["metadata"]["namespace"]);
        let mut fault =
            |what: &str| faults.push(format!("{file}: {kind} {}: {what}", one["metadata"]["name"]));
        for rule in one["rules"].as_array().into_iter().flatten() {
            let (resources, verbs) = (texts(&rule["resources"]), texts(&rule["verbs"]));
            let has = |what: &str| resources.contains(&what) || resources.contains(&"*");
            if has("nodes/proxy") {
                fault("nodes/proxy is exec into every pod");
            }
            if verbs
                .iter()
                .any(|verb| ["*", "escalate", "bind", "impersonate"].contains(verb))
            {
                fault("a verb gives every right");
            }
            let runs = ["pods/exec", "pods/attach", "pods", "pods/ephemeralcontainers"]
                .iter()
                .any(|what| {
                    let reads =
                        *what == "pods" && verbs.iter().all(|verb| ["get", "list", "watch"].contains(verb));
                    has(what) && !reads
                });
            let is_near = workloads()
                .any(|(_, other)| other["metadata"]["namespace"] == *namespace && is_privileged(other));
            if runs && (kind == "ClusterRole" || is_near) {
                fault("it runs programs where a privileged pod is");
            }
        }
    }
    for (file, one) in workloads() {
        let name = &one["metadata"]["name"];
        let mut fault = |what: String| faults.push(format!("{file}: {name}: {what}"));
        let pod = &one["spec"]["template"]["spec"];
        for volume in pod["volumes"].as_array().into_iter().flatten() {
            let path = volume["hostPath"]["path"].as_str().unwrap_or(OWN[0]);
            if !is_privileged(one) && !OWN.iter().any(|own| path.starts_with(own)) {
                fault(format!("it has {path} of the node"));
            }
        }
        if pod["nodeSelector"].is_null() {
            fault("it runs on nodes without GPUs".to_owned());
        }
        for container in pod["containers"].as_array().into_iter().flatten() {
            let image = container["image"].as_str().unwrap_or("");
            if !image.contains("@sha256:") && !image.starts_with(PLACEHOLDER) {
                fault(format!("image {image} can be exchanged"));
            }
            let capabilities = texts(&container["securityContext"]["capabilities"]["add"]);
            if capabilities.iter().any(|one| !["CHOWN", "FOWNER"].contains(one)) {
                fault(format!("it has {capabilities:?}"));
            }
        }
        // An account of a pod that changes nodes is bound to its own.
        let account = pod["serviceAccountName"].as_str().unwrap_or("default");
        let patches = objects.iter().any(|(_, role)| {
            role["metadata"]["name"] == account
                && role["rules"].as_array().into_iter().flatten().any(|rule| {
                    texts(&rule["resources"]).contains(&"nodes") && texts(&rule["verbs"]) != ["get"]
                })
        });
        let user = format!(
            "'system:serviceaccount:{}:{account}'",
            one["metadata"]["namespace"].as_str().unwrap_or("")
        );
        let is_bound = objects.iter().any(|(other, policy)| {
            let by_user = policy["spec"]["matchConditions"][0]["expression"].as_str();
            other == file
                && policy["kind"] == "ValidatingAdmissionPolicy"
                && policy["spec"]["failurePolicy"] == "Fail"
                && by_user.is_some_and(|text| text.ends_with(&user))
        });
        if patches && !is_bound {
            fault(format!("no policy binds {user} to its node"));
        }
    }
    faults
}

#[test]
fn no_shipped_role_is_an_administrator() {
    let objects = shipped();
    let kinds = |wanted: &str| objects.iter().filter(|(_, one)| one["kind"] == wanted).count();
    // Of kustomize and of the chart, and the agents.
    assert_eq!((kinds("DaemonSet"), kinds("ValidatingAdmissionPolicy")), (3, 2));
    assert!(kinds("ClusterRole") >= 4 && kinds("Role") >= 1);
    assert_eq!(faults(&objects), [""; 0]);
}

#[test]
fn every_right_too_many_is_found() {
    let change = |kind: &str, name: &str, place: &str, value: Value| {
        let mut objects = shipped();
        let is_it = |one: &&mut (String, Value)| one.1["kind"] == kind && one.1["metadata"]["name"] == name;
        let (_, object) = objects.iter_mut().find(is_it).unwrap();
        *object.pointer_mut(place).unwrap_or_else(|| panic!("no {place}")) = value;
        faults(&objects).join("\n")
    };
    let found = |(kind, name, place): (&str, &str, &str), value: &str, wanted: &str| {
        let found = change(kind, name, place, serde_json::from_str(value).unwrap());
        assert!(found.contains(wanted), "{place} {value}: {found:?}");
    };
    let drain = ("ClusterRole", "firn-drain", "/rules/0/resources");
    found(drain, r#"["nodes/proxy"]"#, "exec into every pod");
    found(drain, r#"["pods/exec"]"#, "a privileged pod");
    found(drain, r#"["*"]"#, "exec into every pod");
    found(
        ("ClusterRole", "firn-drain", "/rules/0/verbs"),
        r#"["*"]"#,
        "every right",
    );
    let role = ("Role", "firn-drain", "/metadata/namespace");
    found(role, r#""firn-install""#, "a privileged pod");
    let pod = "/spec/template/spec";
    let agent = |place: &str, value: &str, wanted: &str| {
        found(
            ("DaemonSet", "firn-agent", &format!("{pod}{place}")),
            value,
            wanted,
        )
    };
    agent("/volumes/2/hostPath/path", r#""/run/containerd""#, "of the node");
    agent("/containers/0/image", r#""busybox:1.37""#, "can be exchanged");
    let add = "/containers/0/securityContext/capabilities/add";
    agent(add, r#"["DAC_OVERRIDE"]"#, "DAC_OVERRIDE");
    agent("/nodeSelector", "null", "without GPUs");
    // The agents' own namespace with a privileged pod.
    agent(
        "/containers/0/securityContext",
        r#"{"privileged": true}"#,
        "a privileged pod",
    );
    let policy = ("ValidatingAdmissionPolicy", "firn-node", "/spec/failurePolicy");
    found(policy, r#""Ignore""#, "no policy binds");
}
