//! Dependencies between the workspace's crates point one way, and what must not meet stays apart.
#![allow(
    clippy::unwrap_used,
    reason = "a workspace that cannot be read is a test that fails"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// The product's crates, and the crates of the workspace that each may depend on. A crate that does not exist
/// is no error; one that is missing here is.
const ALLOWED: [(&str, &[&str]); 21] = [
    ("criu-plugin", &[]),
    ("interposer", &[]),
    ("host/derive", &[]),
    ("host", &["host/derive"]),
    ("interposer/client", &["host", "interposer"]),
    ("config", &["host"]),
    ("containerd", &[]),
    ("gpu", &["host"]),
    ("oci", &["host", "config", "gpu"]),
    ("store", &["host", "config"]),
    ("image", &["host", "config", "gpu", "oci", "store"]),
    ("remap", &["host", "config", "gpu", "oci", "image"]),
    ("preflight", &["host", "config", "gpu", "oci", "image", "remap"]),
    (
        "worker",
        &["host", "interposer", "interposer/client", "gpu", "preflight"],
    ),
    ("process", &["host", "gpu", "oci"]),
    (
        "transaction",
        &[
            "host",
            "config",
            "gpu",
            "oci",
            "store",
            "image",
            "remap",
            "preflight",
            "process",
        ],
    ),
    (
        "shim",
        &[
            "host",
            "config",
            "containerd",
            "gpu",
            "oci",
            "image",
            "remap",
            "preflight",
            "process",
            "transaction",
        ],
    ),
    (
        "runc",
        &[
            "host",
            "config",
            "gpu",
            "oci",
            "image",
            "preflight",
            "process",
            "transaction",
        ],
    ),
    ("cdi", &["host", "config", "gpu", "oci"]),
    ("hooks", &["host", "config", "gpu", "oci", "image", "cdi"]),
    (
        "cli",
        &[
            "host",
            "config",
            "containerd",
            "gpu",
            "oci",
            "store",
            "image",
            "interposer/client",
            "remap",
            "preflight",
            "process",
            "transaction",
            "cdi",
        ],
    ),
];

/// Directories of crates that build and test the product. No product crate depends on them.
const TOOLS: [&str; 3] = ["xtask", "bench", "tests"];

/// The workspace as cargo sees it.
struct Workspace {
    root: PathBuf,
    /// Direct dependencies (not those of tests) of each crate, by the crate's directory; crates of the
    /// workspace by their directories too.
    direct: BTreeMap<String, BTreeSet<String>>,
    /// Dependencies of each package in Cargo.lock.
    locked: BTreeMap<String, BTreeSet<String>>,
}

impl Workspace {
    fn read() -> Self {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned();
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let output = Command::new(cargo)
            .args([
                "metadata",
                "--no-deps",
                "--offline",
                "--locked",
                "--format-version",
                "1",
            ])
            .current_dir(&root)
            .output()
            .unwrap();
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
        let packages = metadata["packages"].as_array().unwrap();
        let direct = packages.iter().map(|package| {
            let dir = Path::new(package["manifest_path"].as_str().unwrap())
                .parent()
                .unwrap();
            (relative(dir, &root), dependencies(package, &root))
        });
        Self {
            direct: direct.collect(),
            locked: locked(&root),
            root,
        }
    }

    fn exists(&self, krate: &str) -> bool {
        self.direct.contains_key(krate)
    }

    fn product(&self) -> impl Iterator<Item = (&String, &BTreeSet<String>)> {
        let is_tool = |dir: &str| TOOLS.iter().any(|tool| Path::new(dir).starts_with(tool));
        self.direct.iter().filter(move |(dir, _)| !is_tool(dir))
    }

    /// Everything that a crate is built from, directly or not.
    fn closure(&self, krate: &str) -> BTreeSet<String> {
        let mut closure = BTreeSet::new();
        let mut open = vec![krate.to_owned()];
        while let Some(name) = open.pop() {
            let next = self.direct.get(&name).or_else(|| self.locked.get(&name));
            let new: Vec<_> = next
                .into_iter()
                .flatten()
                .filter(|name| !closure.contains(*name))
                .cloned()
                .collect();
            closure.extend(new.iter().cloned());
            open.extend(new);
        }
        closure
    }

    /// The crate that calls the driver's libraries.
    fn ffi(&self) -> &'static str {
        // Until it exists, the worker is a part of `gpu`.
        if self.exists("worker") { "worker" } else { "gpu" }
    }
}

fn relative(dir: &Path, root: &Path) -> String {
    dir.strip_prefix(root).unwrap().display().to_string()
}

/// Names of a package's normal and build dependencies; of those in the workspace, their directories.
fn dependencies(package: &Value, root: &Path) -> BTreeSet<String> {
    let dependencies = package["dependencies"].as_array().unwrap().iter();
    let built = dependencies.filter(|dependency| dependency["kind"] != "dev");
    let name = |dependency: &Value| match dependency["path"].as_str() {
        Some(path) => relative(Path::new(path), root),
        None => dependency["name"].as_str().unwrap().to_owned(),
    };
    built.map(name).collect()
}

/// The dependencies of every package of others, whatever its version: more than are built, and none that is
/// missing.
fn locked(root: &Path) -> BTreeMap<String, BTreeSet<String>> {
    let lock: toml::Table = fs::read_to_string(root.join("Cargo.lock"))
        .unwrap()
        .parse()
        .unwrap();
    let mut all: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for package in lock["package"].as_array().unwrap() {
        let dependencies = package.get("dependencies").and_then(toml::Value::as_array);
        let names = dependencies
            .into_iter()
            .flatten()
            .filter_map(|name| name.as_str()?.split(' ').next());
        let name = package["name"].as_str().unwrap().to_owned();
        all.entry(name).or_default().extend(names.map(str::to_owned));
    }
    all
}

#[test]
fn dependencies_point_one_way() {
    let workspace = Workspace::read();
    let allowed = BTreeMap::from(ALLOWED);
    for (krate, dependencies) in workspace.product() {
        let allowed = allowed.get(krate.as_str());
        let allowed =
            allowed.unwrap_or_else(|| panic!("xtask/tests/structure.rs does not list the crate {krate}"));
        for dependency in dependencies.iter().filter(|name| workspace.exists(name)) {
            assert!(
                allowed.contains(&dependency.as_str()),
                "{krate} may not depend on {dependency}: only on {allowed:?}"
            );
        }
    }
}

#[test]
fn the_table_has_no_circle() {
    for (index, (krate, allowed)) in ALLOWED.iter().enumerate() {
        let before: Vec<&str> = ALLOWED[..index].iter().map(|(name, _)| *name).collect();
        for dependency in *allowed {
            assert!(before.contains(dependency), "{krate} comes before {dependency}");
        }
    }
}

#[test]
fn only_the_worker_links_the_driver() {
    let workspace = Workspace::read();
    for (krate, _) in workspace.product() {
        let links = workspace.closure(krate).contains("libloading");
        // What is built with the worker inside, until that is a crate of its own.
        let may = krate == workspace.ffi() || !workspace.exists("worker");
        assert!(may || !links, "{krate} is built with libloading");
    }
    assert!(workspace.closure(workspace.ffi()).contains("libloading"));
}

#[test]
fn the_transaction_knows_no_ttrpc() {
    let workspace = Workspace::read();
    if !workspace.exists("transaction") {
        return;
    }
    let closure = workspace.closure("transaction");
    for package in ["ttrpc", "containerd-shim-protos", "protobuf"] {
        assert!(
            !closure.contains(package),
            "the transaction is built with {package}"
        );
    }
}

/// Called by CRIU, with C's types.
const PLUGIN: &str = "criu-plugin";

/// Crates with modules that may be unsafe: the driver's functions, CRIU's hooks, and system calls without a
/// safe wrapper.
#[test]
fn unsafe_code_is_forbidden_but_in_the_worker_and_for_system_calls() {
    let workspace = Workspace::read();
    for (krate, _) in workspace.product() {
        let src = workspace.root.join(krate).join("src");
        let roots = ["lib.rs", "main.rs"].map(|name| src.join(name));
        let root = roots.iter().find(|path| path.is_file()).unwrap();
        let text = fs::read_to_string(root).unwrap();
        let excepted = [workspace.ffi(), PLUGIN].contains(&krate.as_str()) || has_system_calls(&src);
        let attribute = if excepted {
            "#![deny(unsafe_code)]"
        } else {
            "#![forbid(unsafe_code)]"
        };
        assert!(text.contains(attribute), "{} has no {attribute}", root.display());
    }
}

/// Whether a crate has the module of system calls, `sys.rs`. Other modules of it may not be unsafe.
fn has_system_calls(src: &Path) -> bool {
    let file = src.join("sys.rs");
    fs::read_to_string(file).is_ok_and(|text| text.contains("#![allow(unsafe_code)]"))
}

/// Files that only tests and fuzz targets use: they may use any module.
const TEST_FILES: [&str; 7] = ["tests", "testing", "fuzz", "stub", "fixtures", "world", "made"];

/// The modules at the top of a crate, each with those that it uses by `crate::`.
fn modules(src: &Path) -> BTreeMap<String, BTreeSet<String>> {
    let mut modules: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let mut files = vec![src.to_owned()];
    while let Some(path) = files.pop() {
        let inside = relative(&path, src);
        if TEST_FILES.iter().any(|name| inside.contains(name)) {
            continue;
        }
        if path.is_dir() {
            files.extend(fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()));
            continue;
        }
        let top = inside.split('/').next().unwrap().trim_end_matches(".rs");
        if matches!(top, "lib" | "main") {
            continue;
        }
        let text = fs::read_to_string(&path).unwrap();
        let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
        let uses = modules.entry(top.to_owned()).or_default();
        let is_code = |line: &&str| !line.trim_start().starts_with("//");
        for line in code.lines().filter(is_code) {
            // `use crate::{a, b::C}` names several.
            for names in line.split("crate::").skip(1) {
                let names = names.strip_prefix('{').unwrap_or(names);
                for name in names.split(", ") {
                    let is_word = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
                    let word = name.split(|c| !is_word(c)).next().unwrap();
                    if word != top {
                        uses.insert(word.to_owned());
                    }
                }
            }
        }
    }
    let known: BTreeSet<String> = modules.keys().cloned().collect();
    modules
        .values_mut()
        .for_each(|uses| uses.retain(|name| known.contains(name)));
    modules
}

#[test]
fn modules_of_a_crate_use_each_other_one_way() {
    let workspace = Workspace::read();
    let mut arrows = 0;
    for (krate, _) in workspace.product() {
        let mut modules = modules(&workspace.root.join(krate).join("src"));
        arrows += modules.values().map(BTreeSet::len).sum::<usize>();
        // Takes those away that use nothing, until none is left.
        while let Some(last) = modules.iter().find(|(_, uses)| uses.is_empty()) {
            let last = last.0.clone();
            modules.remove(&last);
            for uses in modules.values_mut() {
                uses.remove(&last);
            }
        }
        assert!(
            modules.is_empty(),
            "modules of {krate} use each other in a circle: {modules:?}"
        );
    }
    assert!(arrows > 100, "only {arrows} arrows were found");
}
