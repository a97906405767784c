//! The list of what a release is built from (SBOM), in the JSON of CycloneDX 1.5.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::output;
use crate::tools::cargo;

/// The packages with the programs of a release.
const PROGRAMS: [&str; 6] = [
    "firn",
    "firn-criu-plugin",
    "firn-hook",
    "firn-runc",
    "firn-shim",
    "firn-worker",
];

/// The packages that are linked into the programs, for the target, or built them.
pub(super) fn document(workspace: &Path, target: &str) -> Result<String> {
    let metadata = output(
        cargo()
            .args([
                "metadata",
                "--locked",
                "--format-version",
                "1",
                "--filter-platform",
                target,
            ])
            .current_dir(workspace),
    )?;
    let metadata: Value = serde_json::from_str(&metadata)?;
    let lock = fs::read_to_string(workspace.join("Cargo.lock"))?;
    let sums = checksums(&toml::from_str(&lock)?);
    let used = used(&metadata)?;
    let packages = metadata["packages"].as_array().context("cargo lists packages")?;
    let parts: Vec<Value> = packages
        .iter()
        .filter(|package| used.contains(text(&package["id"])))
        .map(|package| component(package, &sums))
        .collect();
    let document = json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {
            "type": "application", "name": "firn", "version": env!("CARGO_PKG_VERSION"),
        }},
        "components": parts,
    });
    Ok(serde_json::to_string_pretty(&document)? + "\n")
}

/// Ids of the packages on which the programs depend, themselves too, without those of tests.
fn used(metadata: &Value) -> Result<BTreeSet<&str>> {
    let nodes = metadata["resolve"]["nodes"]
        .as_array()
        .context("cargo resolves dependencies")?;
    let nodes: BTreeMap<&str, &Value> = nodes.iter().map(|node| (text(&node["id"]), node)).collect();
    let packages = metadata["packages"].as_array().context("cargo lists packages")?;
    let own = packages
        .iter()
        .filter(|package| PROGRAMS.contains(&text(&package["name"])) && package["source"].is_null());
    let mut open: Vec<&str> = own.map(|package| text(&package["id"])).collect();
    let mut used = BTreeSet::new();
    while let Some(id) = open.pop() {
        if !used.insert(id) {
            continue;
        }
        let node = nodes
            .get(id)
            .with_context(|| format!("cargo has not resolved {id}"))?;
        let deps = node["deps"].as_array().into_iter().flatten();
        let ships = |dep: &&Value| {
            let mut kinds = dep["dep_kinds"].as_array().into_iter().flatten();
            kinds.any(|kind| kind["kind"] != "dev")
        };
        open.extend(deps.filter(ships).map(|dep| text(&dep["pkg"])));
    }
    Ok(used)
}

fn component(package: &Value, sums: &BTreeMap<(String, String), String>) -> Value {
    let (name, version) = (text(&package["name"]), text(&package["version"]));
    let mut part = json!({
        "type": "library",
        "name": name,
        "version": version,
        "purl": format!("pkg:cargo/{name}@{version}"),
    });
    if let Some(license) = package["license"].as_str() {
        part["licenses"] = json!([{"expression": license.replace('/', " OR ")}]);
    }
    if let Some(sum) = sums.get(&(name.to_owned(), version.to_owned())) {
        part["hashes"] = json!([{"alg": "SHA-256", "content": sum}]);
    }
    part
}

/// SHA-256 of the packages in Cargo.lock, by name and version. Those of the workspace have none.
fn checksums(lock: &toml::Table) -> BTreeMap<(String, String), String> {
    let packages = lock.get("package").and_then(toml::Value::as_array);
    let sum = |package: &toml::Value| {
        let field = |name: &str| Some(package.get(name)?.as_str()?.to_owned());
        Some(((field("name")?, field("version")?), field("checksum")?))
    };
    packages.into_iter().flatten().filter_map(sum).collect()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_ships_is_listed_with_its_checksum_and_what_only_tests_is_not() {
        let target = "x86_64-unknown-linux-gnu";
        let listed: Value =
            serde_json::from_str(&document(&crate::workspace().unwrap(), target).unwrap()).unwrap();
        let parts = listed["components"].as_array().unwrap();
        let find = |name: &str| parts.iter().find(|part| part["name"] == name);
        let serde = find("serde").unwrap();
        assert_eq!(serde["hashes"][0]["content"].as_str().unwrap().len(), 64);
        assert_eq!(serde["licenses"][0]["expression"], "MIT OR Apache-2.0");
        assert!(find("firn-transaction").is_some_and(|part| part["hashes"].is_null()));
        assert!(find("libtest-mimic").is_none() && find("simgpu-cuda").is_none());
    }
}
