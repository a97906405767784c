//! What a container's processes are by containerd's record of it, and the checkpoint's record of the same.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use firn_config::names;
use firn_host::atomic_file;
use serde::{Deserialize, Serialize};

use super::error::CriError;
use crate::containerd::Recorded;

const VERSION: u32 = 1;

/// The containers of a pod when it was checkpointed, by their names.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub struct Pod {
    version: u32,
    pub containers: BTreeMap<String, Process>,
}

/// The process of a container, as it is started.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Process {
    /// Id of the image.
    image: String,
    args: Vec<String>,
    cwd: String,
    uid: u32,
    gid: u32,
    groups: BTreeSet<u32>,
    /// What CRI's caller has set, and not what image, CDI files and containerd add.
    env: BTreeMap<String, String>,
}

impl Pod {
    pub fn of(containers: BTreeMap<String, Process>) -> Self {
        let version = VERSION;
        Self { version, containers }
    }

    /// Writes it into the directory of a checkpoint whose images are complete.
    pub fn write(&self, dir: &Path) -> Result<(), CriError> {
        let json = serde_json::to_vec_pretty(self).unwrap_or_default();
        let written = atomic_file::write(dir, names::POD_FILE, &json, 0o600);
        written.map_err(|source| CriError::Directory {
            path: dir.to_owned(),
            source,
        })
    }

    pub fn read(dir: &Path) -> Result<Self, CriError> {
        let wrong = |reason: String| CriError::Checkpoint {
            path: dir.to_owned(),
            reason,
        };
        let json = std::fs::read(dir.join(names::POD_FILE));
        let json = json.map_err(|error| wrong(format!("{}: {error}", names::POD_FILE)))?;
        let pod: Self = serde_json::from_slice(&json).map_err(|error| wrong(error.to_string()))?;
        match pod.version {
            VERSION => Ok(pod),
            other => Err(wrong(format!("its version is {other}, of another firn"))),
        }
    }
}

/// What CRI's plugin notes of a container.
#[derive(Deserialize)]
struct Noted {
    #[serde(rename = "Metadata")]
    metadata: Metadata,
}

#[derive(Deserialize)]
struct Metadata {
    #[serde(rename = "ImageRef")]
    image: String,
    #[serde(rename = "Config")]
    config: Config,
}

#[derive(Deserialize)]
struct Config {
    #[serde(default)]
    envs: Vec<Env>,
}

#[derive(Deserialize)]
struct Env {
    #[serde(default)]
    key: String,
}

#[derive(Deserialize)]
struct Spec {
    process: SpecProcess,
}

#[derive(Deserialize)]
struct SpecProcess {
    args: Vec<String>,
    #[serde(default)]
    env: Vec<String>,
    cwd: String,
    user: User,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct User {
    uid: u32,
    gid: u32,
    #[serde(default)]
    additional_gids: BTreeSet<u32>,
}

impl Process {
    pub fn of(recorded: &Recorded) -> Result<Self, CriError> {
        let lacks = |what| {
            move |_error: serde_json::Error| CriError::Record {
                id: recorded.id.clone(),
                what,
            }
        };
        let noted: Noted = serde_json::from_slice(recorded.metadata()).map_err(lacks("the configuration"))?;
        let spec: Spec = serde_json::from_slice(recorded.spec()).map_err(lacks("the spec"))?;
        let SpecProcess { args, env, cwd, user } = spec.process;
        // The values are those of the spec: containerd's versions note them in different forms.
        let value = |key: &str| {
            env.iter()
                .find_map(|pair| pair.strip_prefix(key)?.strip_prefix('='))
        };
        let set = noted.metadata.config.envs.into_iter();
        let set = set.map(|Env { key }| (value(&key).unwrap_or_default().to_owned(), key));
        Ok(Self {
            image: noted.metadata.image,
            args,
            cwd,
            uid: user.uid,
            gid: user.gid,
            groups: user.additional_gids,
            env: set.map(|(value, key)| (key, value)).collect(),
        })
    }

    /// Fails with the first difference of a process that is to be restored as this one.
    pub fn expect(&self, name: &str, wanted: &Self) -> Result<(), CriError> {
        let differs = |what: &str, there: String, wanted: String| {
            Err(CriError::Mismatch {
                name: name.to_owned(),
                what: what.to_owned(),
                there,
                wanted,
            })
        };
        if self.image != wanted.image {
            return differs("the image", self.image.clone(), wanted.image.clone());
        }
        let user = |of: &Self| format!("{}:{} {:?}", of.uid, of.gid, of.groups);
        for (what, there, is) in [
            (
                "the command",
                format!("{:?}", self.args),
                format!("{:?}", wanted.args),
            ),
            ("the directory", self.cwd.clone(), wanted.cwd.clone()),
            ("the user", user(self), user(wanted)),
        ] {
            if there != is {
                return differs(what, there, is);
            }
        }
        // A value may be a secret, and errors are logged.
        let state = |one: &Self, other: &Self, key: &str| match (one.env.get(key), other.env.get(key)) {
            (None, _) => "not set",
            (Some(_), None) => "set",
            (Some(_), Some(_)) => "another",
        };
        let keys = self.env.keys().chain(wanted.env.keys());
        match keys
            .into_iter()
            .find(|key| self.env.get(*key) != wanted.env.get(*key))
        {
            None => Ok(()),
            Some(key) => {
                let (there, is) = (state(self, wanted, key), state(wanted, self, key));
                differs(&format!("the variable {key}"), there.to_owned(), is.to_owned())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process() -> Process {
        Process {
            image: "sha256:1".to_owned(),
            args: vec!["job".to_owned()],
            cwd: "/".to_owned(),
            uid: 0,
            gid: 0,
            groups: BTreeSet::from([1]),
            env: BTreeMap::from([("A".to_owned(), "secret".to_owned())]),
        }
    }

    #[test]
    fn every_difference_is_found_and_no_value_is_shown() {
        let is = process();
        is.expect("c", &process()).unwrap();
        type Change = fn(&mut Process);
        let changes: [(&str, Change); 8] = [
            ("the image", |other| other.image.push('2')),
            ("the command", |other| other.args.push("-v".to_owned())),
            ("the directory", |other| other.cwd.push('x')),
            ("the user", |other| other.uid = 1),
            ("the user", |other| other.groups.clear()),
            ("the variable A", |other| {
                drop(other.env.insert("A".to_owned(), "x".to_owned()))
            }),
            ("the variable A", |other| other.env.clear()),
            ("the variable B", |other| {
                drop(other.env.insert("B".to_owned(), "x".to_owned()))
            }),
        ];
        for (what, change) in changes {
            let mut other = process();
            change(&mut other);
            let error = is.expect("c", &other).unwrap_err().to_string();
            assert!(
                error.starts_with(&format!("{what} of container c was ")),
                "{error}"
            );
            assert!(!error.contains("secret"), "{error}");
        }
    }

    #[test]
    fn another_version_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let mut pod = Pod::of(BTreeMap::from([("c".to_owned(), process())]));
        pod.write(dir.path()).unwrap();
        assert_eq!(Pod::read(dir.path()).unwrap(), pod);
        pod.version += 1;
        pod.write(dir.path()).unwrap();
        let error = Pod::read(dir.path()).unwrap_err().to_string();
        assert!(error.contains("of another firn"), "{error}");
    }
}
