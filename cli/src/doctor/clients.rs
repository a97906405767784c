//! Which shim or runtime each client of this node really starts.

use std::fs;
use std::path::{Path, PathBuf};

use firn_config::{in_path, names};
use serde_json::Value;

use super::{Check, ONE_RELEASE};
use crate::daemon::{Daemon, Shim};
use crate::install::{is_older_than, runtimes, search_path};

const OURS: &str = env!("CARGO_PKG_VERSION");
/// firn's runtime.
const FIRN: &str = "io.containerd.firn.v2";
/// containerd's own.
const STOCK: &str = "io.containerd.runc.v2";
const DOCKER_CONFIG: &str = "/etc/docker/daemon.json";
const CONTAINERS_CONF: [&str; 2] = [
    "/usr/share/containers/containers.conf",
    "/etc/containers/containers.conf",
];

pub fn checks(daemon: &Daemon) -> Vec<Check> {
    let has = |name: &&&str| in_path(name, &search_path()).is_some();
    let clients: Vec<&str> = ["ctr", "nerdctl", "docker"].iter().filter(has).copied().collect();
    let by = if clients.is_empty() {
        "ctr (not installed here)".to_owned()
    } else {
        clients.join(", ")
    };
    let mut checks = containerd(daemon);
    checks.extend(shims(FIRN, &by, daemon));
    checks.extend(shims(STOCK, &by, daemon));
    checks.extend(kubernetes(daemon));
    if clients.contains(&"docker") {
        checks.extend(docker(Path::new(DOCKER_CONFIG), daemon));
    }
    checks.extend(in_path("podman", &search_path()).map(|_| podman(&CONTAINERS_CONF.map(Path::new))));
    checks
}

/// Its version, whether it runs, and whether it can read its configuration.
fn containerd(daemon: &Daemon) -> Vec<Check> {
    const NAME: &str = "containerd";
    let version = match daemon.version() {
        Ok(version) => version,
        Err(found) => {
            return vec![Check::fail(
                NAME,
                found,
                "`apt install containerd`, or install it from its release",
            )];
        }
    };
    let number = |at: usize| {
        version
            .trim_start_matches('v')
            .split('.')
            .nth(at)?
            .parse::<u32>()
            .ok()
    };
    let is_old = (number(0), number(1)) < (Some(1), Some(7));
    let config = daemon.config.display();
    let mut checks = vec![match daemon.pid {
        _ if is_old => Check::fail(
            NAME,
            format!("{version} is too old"),
            "install containerd 1.7 or later",
        ),
        Some(_) => Check::ok(NAME, version),
        None => Check::warn(
            NAME,
            format!("{version}, and it does not run"),
            "`systemctl start containerd`",
        ),
    }];
    if is_older_than(&daemon.config) {
        checks.push(Check::warn(
            NAME,
            format!("it runs since before {config} was changed"),
            "`systemctl restart containerd`; containers run on",
        ));
    }
    checks
}

/// What a runtime's name starts, for clients that call containerd.
fn shims(runtime: &str, by: &str, daemon: &Daemon) -> Vec<Check> {
    let is_firns_name = runtime == FIRN;
    let name = if is_firns_name { "shim" } else { "stock shim" };
    let found = daemon.shims(runtime);
    let Some((first, hidden)) = found.split_first() else {
        let path = daemon.path.to_string_lossy();
        return if is_firns_name {
            vec![Check::fail(
                name,
                format!("{by}: {runtime} is no program in containerd's PATH ({path})"),
                "`firn install`",
            )]
        } else {
            Vec::new()
        };
    };
    let mut checks = vec![started(name, &format!("{by}: {runtime}"), first, is_firns_name)];
    let older = hidden
        .iter()
        .filter(|shim| shim.is_firns && shim.version != first.version);
    checks.extend(older.map(|shim| {
        let (path, hidden) = (first.path.display(), shim.path.display());
        Check::warn(
            name,
            format!("{path} {} hides {hidden} {}", first.version, shim.version),
            format!("remove the one that is not wanted: `rm {hidden}`"),
        )
    }));
    checks
}

/// A shim that somebody starts by this name.
fn started(name: &'static str, who: &str, shim: &Shim, has_to_be_firns: bool) -> Check {
    let path = shim.path.display();
    match (shim.is_firns, shim.version.as_str()) {
        (true, OURS) => Check::ok(name, format!("{who} is {path}, firn {OURS}")),
        (true, other) => Check::fail(
            name,
            format!("{who} is {path}, firn {other}, and this is {OURS}"),
            ONE_RELEASE,
        ),
        (false, _) if has_to_be_firns => Check::fail(
            name,
            format!("{who} is {path}, which is not firn's"),
            "`firn install`",
        ),
        (false, _) => Check::ok(name, format!("{who} is {path}, containerd's own")),
    }
}

/// The runtime handlers of containerd's CRI plugin, with what its configuration imports.
fn kubernetes(daemon: &Daemon) -> Vec<Check> {
    const NAME: &str = "handlers";
    const INSTALL: &str = "`firn install --containerd --restart`";
    if daemon.program.is_none() {
        return Vec::new();
    }
    let config = daemon.config.display();
    let all = match daemon.configuration() {
        Ok(all) => all,
        Err(error) => {
            return vec![Check::fail(
                "containerd",
                format!("{config} cannot be read: {error}"),
                format!("correct it; `containerd --config {config} config dump` checks it"),
            )];
        }
    };
    let handlers = runtimes(&all).flatten();
    let of_firn: Vec<Check> = handlers
        .filter_map(|(handler, table)| of_handler(NAME, handler, table, daemon))
        .collect();
    let has_kubelet = in_path("kubelet", &search_path()).is_some();
    match of_firn.is_empty() {
        false => of_firn,
        true if has_kubelet => vec![Check::warn(
            NAME,
            "the kubelet has no handler that is firn's",
            INSTALL,
        )],
        true => vec![Check::ok(NAME, "none is firn's; Kubernetes needs one")],
    }
}

/// None: it is another runtime's.
fn of_handler(name: &'static str, handler: &str, table: &toml::Value, daemon: &Daemon) -> Option<Check> {
    let text = |key: &str| {
        table
            .get(key)
            .and_then(toml::Value::as_str)
            .filter(|text| !text.is_empty())
    };
    let runtime = text("runtime_path").or_else(|| text("runtime_type"))?;
    let is_meant = handler == "firn" || runtime == FIRN || runtime.contains(names::SHIM_PROGRAM);
    let who = format!("Kubernetes, handler {handler}: {runtime}");
    let found = daemon.shims(runtime);
    let Some(shim) = found.first() else {
        let remedy = "`firn install --containerd --restart`";
        return is_meant.then(|| Check::fail(name, format!("{who} is no program"), remedy));
    };
    if !is_meant && !shim.is_firns {
        return None;
    }
    let binary = table.get("options").and_then(|options| options.get("BinaryName"));
    let binary = binary
        .and_then(toml::Value::as_str)
        .filter(|binary| !binary.is_empty());
    let missing = binary.filter(|binary| {
        if binary.starts_with('/') {
            !Path::new(binary).is_file()
        } else {
            in_path(binary, &daemon.path).is_none()
        }
    });
    Some(match missing {
        Some(binary) => Check::fail(
            name,
            format!("{who}: BinaryName {binary} is no program"),
            format!(
                "correct BinaryName in {}, then `systemctl restart containerd`",
                daemon.config.display()
            ),
        ),
        None => started(name, &who, shim, true),
    })
}

/// The runtimes that docker's configuration names.
fn docker(config: &Path, daemon: &Daemon) -> Vec<Check> {
    const NAME: &str = "docker";
    let shown = config.display();
    let all: Value = match fs::read(config)
        .ok()
        .map(|text| serde_json::from_slice(&text))
        .transpose()
    {
        Ok(all) => all.unwrap_or_default(),
        Err(error) => {
            let found = format!("{shown} is no JSON: {error}");
            return vec![Check::fail(
                NAME,
                found,
                "correct it; `dockerd --validate` checks it",
            )];
        }
    };
    let runtimes = all["runtimes"].as_object().into_iter().flatten();
    let mut checks = Vec::new();
    for (name, runtime) in runtimes {
        let of_firn = |key: &str| runtime[key].as_str().filter(|value| value.contains("firn"));
        let Some(value) = of_firn("runtimeType").or_else(|| of_firn("path")) else {
            continue;
        };
        let who = format!("docker --runtime {name}: {value}");
        checks.push(match daemon.shims(value).first() {
            Some(shim) => started(NAME, &who, shim, true),
            None => Check::fail(NAME, format!("{who} is no program"), "`firn install`"),
        });
    }
    if !checks.is_empty() && all["experimental"] != true {
        checks.push(Check::warn(
            NAME,
            "it has no checkpoints without \"experimental\": true",
            format!("set it in {shown}, then `systemctl restart docker`"),
        ));
    }
    if checks.is_empty() {
        checks.push(Check::ok(NAME, format!("docker run --runtime {FIRN}")));
    }
    checks
}

/// The runtimes that podman's configuration names.
fn podman(files: &[&Path]) -> Check {
    const NAME: &str = "podman";
    let mut files: Vec<PathBuf> = files.iter().map(|path| path.to_path_buf()).collect();
    let more = files.last().map(|last| last.with_extension("conf.d"));
    let mut more: Vec<PathBuf> = more
        .into_iter()
        .flat_map(fs::read_dir)
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .collect();
    more.sort();
    files.append(&mut more);
    let tables = files
        .iter()
        .filter_map(|file| fs::read_to_string(file).ok()?.parse::<toml::Table>().ok());
    let (mut default, mut paths) = (None, None);
    for table in tables {
        let Some(engine) = table.get("engine") else {
            continue;
        };
        default = engine
            .get("runtime")
            .and_then(toml::Value::as_str)
            .map(str::to_owned)
            .or(default);
        let named = engine
            .get("runtimes")
            .and_then(|all| all.get(names::RUNC_PROGRAM));
        paths = named.and_then(toml::Value::as_array).cloned().or(paths);
    }
    let default = default.unwrap_or_else(|| "its own choice".to_owned());
    let Some(paths) = paths else {
        return if default == names::RUNC_PROGRAM {
            Check::fail(
                NAME,
                format!("its runtime is {default}, and [engine.runtimes] does not name its path"),
                "add it to /etc/containers/containers.conf; `podman info` shows the runtime",
            )
        } else {
            Check::ok(
                NAME,
                format!("its runtime is {default}; firn's is named by --runtime PATH"),
            )
        };
    };
    let paths: Vec<&str> = paths.iter().filter_map(toml::Value::as_str).collect();
    match paths.iter().find(|path| Path::new(path).is_file()) {
        Some(path) => Check::ok(
            NAME,
            format!(
                "podman --runtime {} is {path}; default: {default}",
                names::RUNC_PROGRAM
            ),
        ),
        None => Check::fail(
            NAME,
            format!("none of {} is there", paths.join(", ")),
            "`firn install`",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Status;
    use super::*;

    #[test]
    fn podmans_runtime_is_where_its_configuration_names_it() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("containers.conf");
        let of = |text: String| {
            fs::write(&file, text).unwrap();
            podman(&[&file])
        };
        let named = |path: &Path| {
            format!("[engine]\nruntime = \"firn-runc\"\n[engine.runtimes]\nfirn-runc = [{path:?}]\n")
        };
        assert_eq!(of(String::new()).status, Status::Ok);
        assert_eq!(
            of("[engine]\nruntime = \"firn-runc\"\n".to_owned()).status,
            Status::Fail
        );
        let found = of(named(&file));
        assert!(
            found.status == Status::Ok && found.found.contains("default: firn-runc"),
            "{found:?}"
        );
        assert_eq!(of(named(Path::new("/none"))).remedy.unwrap(), "`firn install`");
    }

    #[test]
    fn dockers_runtimes_are_looked_up() {
        let daemon = Daemon {
            pid: None,
            path: "/none".into(),
            program: None,
            config: "/none".into(),
        };
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("daemon.json");
        let of = |text: &str| {
            fs::write(&file, text).unwrap();
            docker(&file, &daemon)
        };
        assert_eq!(of("{}")[0].status, Status::Ok);
        assert!(
            of("{")
                .first()
                .unwrap()
                .remedy
                .as_ref()
                .unwrap()
                .contains("dockerd --validate")
        );
        let found =
            of(r#"{"runtimes": {"firn": {"runtimeType": "io.containerd.firn.v2"}, "x": {"path": "/x"}}}"#);
        assert_eq!(found.len(), 2);
        assert!(
            found[0].found.ends_with("io.containerd.firn.v2 is no program"),
            "{found:?}"
        );
        assert!(found[1].found.contains("experimental"), "{found:?}");
    }
}
