//! A container whose CUDA processes are one launch job: the driver checkpoints them together, with the memory that they share
//! by cudaIpc.
//!
//! A process belongs to the job whose file `CUDA_CHECKPOINT_JOB_FILE` names when it starts CUDA. NVIDIA's tool makes the
//! file in a memfd; a program that starts others without its descriptors, as Python does, would lose it. So firn keeps it in
//! the bundle, and the container sees it at [`FILE`]. The driver writes to it, and a restored process finds what was in it
//! at the dump: it travels in the image as [`IN_IMAGE`], among the files whose checksums the manifest has.
//!
//! Asked for by the annotation `firn.dev/ipc` with the value `job`, where the node's configuration allows it. Nothing here
//! has been tried on a driver that knows launch jobs ([docs/design/decisions/0011](../../docs/design/decisions/0011-launch-jobs.md)).

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use firn_config::names;
use serde_json::{Value, json};

use crate::manifest::{ImageDir, LaunchJob};
use crate::{Spec, SpecError, atomic, open_regular};

/// Values of the annotation.
const JOB: &str = "job";
const NONE: &str = "none";

/// The variable that names the job's file.
pub const VARIABLE: &str = "CUDA_CHECKPOINT_JOB_FILE";

/// Where the container sees it.
pub const FILE: &str = "/run/firn-cuda-job";

/// Its name in an image. It ends as CRIU's do, so that it is described and compared with them.
pub const IN_IMAGE: &str = "firn-cuda-job.img";

/// As firn-gpu makes it: whoever is in the container can write it, as a memfd that all have inherited. The bundle is root's.
const MODE: u32 = 0o666;

/// More than it ever has.
const MOST_BYTES: u64 = 1 << 20;

/// A container that cannot be one launch job, or not the one that it was.
#[derive(Debug, thiserror::Error)]
pub enum JobError {
    #[error(
        "the annotation firn.dev/ipc=job asks for a launch job, and this node's configuration allows none"
    )]
    Off,
    #[error("the annotation firn.dev/ipc=job asks for a launch job, and the container has a user namespace")]
    UserNamespace,
    #[error(
        "the container's environment has {VARIABLE}={value}, and the annotation firn.dev/ipc=job sets it"
    )]
    Contrary { value: String },
    #[error("the spec has a mount at {FILE}, where the file of the launch job belongs")]
    Taken,
    /// As the driver worker tells it.
    #[error("this node cannot make a launch job: {message}")]
    Refused { message: String, hint: String },
    #[error("the checkpoint is of a launch job, and the container has not the annotation firn.dev/ipc=job")]
    NotAsked,
    #[error("the processes of the checkpoint look for their launch job in {}, where this firn puts none", file.display())]
    Elsewhere { file: PathBuf },
    #[error("cannot {what} the file of the launch job {}", path.display())]
    File {
        what: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    #[error("cannot edit the spec")]
    Spec(#[from] SpecError),
}

impl JobError {
    /// The code shown to users.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Spec(error) => error.code(),
            _ => "FIRN-LAUNCH-JOB",
        }
    }

    /// What the user can do.
    pub fn hint(&self) -> &str {
        match self {
            Self::Off => {
                "leave the annotation out, or let the operator name the driver's cuda-checkpoint: launch-jobs under [create] \
                 in the configuration"
            }
            Self::UserNamespace => "run it without user namespace, or leave the annotation out",
            Self::Contrary { .. } => {
                "leave the variable out of the container's environment, or the annotation"
            }
            Self::Taken => "mount it elsewhere, or leave the annotation out",
            Self::Refused { hint, .. } => hint,
            Self::NotAsked => "give the container the annotation that its source had",
            Self::Elsewhere { .. } => "restore with the firn that made the checkpoint",
            Self::File { .. } => {
                "see that the bundle and the image are complete and their file systems not full"
            }
            Self::Spec(error) => error.hint(),
        }
    }
}

/// Whether the container asks to be one launch job.
pub fn is_asked(spec: &Spec) -> bool {
    spec.annotation(names::ANNOTATION_IPC) == Some(JOB)
}

/// Whether the container's owner says that its processes share no GPU memory.
pub fn shares_nothing(spec: &Spec) -> bool {
    spec.annotation(names::ANNOTATION_IPC) == Some(NONE)
}

/// The job that the container in this bundle is.
pub fn of_bundle(spec: &Spec, bundle: &Path) -> Option<LaunchJob> {
    let is_one = is_asked(spec) && bundle.join(names::BUNDLE_JOB).is_file();
    is_one.then(|| LaunchJob { file: FILE.into() })
}

/// Edits the spec of a container whose job's file is, or will be, in its bundle: the variable, and the file as a mount. Safe
/// to repeat.
pub fn add(spec: &mut Spec, bundle: &Path) -> Result<(), JobError> {
    if spec.has_namespace("user") {
        return Err(JobError::UserNamespace);
    }
    set_variable(spec)?;
    let source = bundle.join(names::BUNDLE_JOB);
    let mut mounts = spec.mounts()?.into_iter();
    match mounts.rfind(|mount| mount.destination == Path::new(FILE)) {
        Some(mount) if mount.source == source => return Ok(()),
        Some(_) => return Err(JobError::Taken),
        None => {}
    }
    let root = spec.object_mut(&[], "mounts")?;
    let mounts = root.entry("mounts").or_insert(Value::Null);
    if mounts.is_null() {
        *mounts = json!([]);
    }
    let mounts = mounts.as_array_mut().ok_or(SpecError::Malformed {
        part: "mounts",
        source: None,
    })?;
    mounts.push(json!({
        "destination": FILE,
        "type": "bind",
        "source": source,
        "options": ["bind", "rprivate", "rw", "nosuid", "nodev", "noexec"],
    }));
    Ok(())
}

fn set_variable(spec: &mut Spec) -> Result<(), JobError> {
    let process = spec.object_mut(&["process"], "process")?;
    let list = process.entry("env").or_insert(Value::Null);
    if list.is_null() {
        *list = json!([]);
    }
    let list = list.as_array_mut().ok_or(SpecError::Malformed {
        part: "process.env",
        source: None,
    })?;
    let values = list
        .iter()
        .filter_map(|entry| entry.as_str()?.strip_prefix(VARIABLE)?.strip_prefix('='));
    let mut is_set = false;
    for value in values {
        if value != FILE {
            let value = value.chars().take(64).collect();
            return Err(JobError::Contrary { value });
        }
        is_set = true;
    }
    if !is_set {
        list.push(json!(format!("{VARIABLE}={FILE}")));
    }
    Ok(())
}

/// Puts the job's file, as it is when all processes are checkpointed, into the image.
pub fn keep(bundle: &Path, image: &Path) -> Result<(), JobError> {
    let path = bundle.join(names::BUNDLE_JOB);
    let bytes = open_regular(&path).and_then(|file| whole(&file));
    let bytes = bytes.map_err(|source| JobError::File {
        what: "read",
        path,
        source,
    })?;
    atomic::write(image, IN_IMAGE, &bytes, 0o600).map_err(|source| JobError::File {
        what: "write",
        path: image.join(IN_IMAGE),
        source,
    })
}

/// Makes the container in `bundle` the launch job that the checkpoint in `image` was, where it was one. Gives whether.
pub fn bring(
    spec: &mut Spec,
    was: Option<&LaunchJob>,
    image: &Path,
    bundle: &Path,
    is_allowed: bool,
) -> Result<bool, JobError> {
    let Some(was) = was else { return Ok(false) };
    if !is_asked(spec) {
        return Err(JobError::NotAsked);
    }
    if !is_allowed {
        return Err(JobError::Off);
    }
    if was.file != Path::new(FILE) {
        return Err(JobError::Elsewhere {
            file: was.file.clone(),
        });
    }
    let bytes = ImageDir::open(image)
        .and_then(|dir| dir.file(IN_IMAGE))
        .and_then(|file| whole(&file))
        .map_err(|source| JobError::File {
            what: "read",
            path: image.join(IN_IMAGE),
            source,
        })?;
    atomic::write(bundle, names::BUNDLE_JOB, &bytes, MODE).map_err(|source| JobError::File {
        what: "write",
        path: bundle.join(names::BUNDLE_JOB),
        source,
    })?;
    add(spec, bundle)?;
    Ok(true)
}

fn whole(file: &File) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.take(MOST_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MOST_BYTES {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "it is too large"));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    fn asking(env: &[&str]) -> Spec {
        Spec::from(json!({
            "annotations": {"firn.dev/ipc": "job"},
            "process": {"env": env},
            "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"}],
        }))
    }

    #[test]
    fn the_annotations_words_are_none_and_job() {
        for (value, nothing, one_job) in [
            ("none", true, false),
            ("job", false, true),
            ("", false, false),
            ("None", false, false),
            ("all", false, false),
        ] {
            let spec = Spec::from(json!({"annotations": {"firn.dev/ipc": value}}));
            assert_eq!(
                (shares_nothing(&spec), is_asked(&spec)),
                (nothing, one_job),
                "{value:?}"
            );
        }
    }

    #[test]
    fn the_variable_and_the_file_are_added_once() {
        let mut spec = asking(&["PATH=/bin"]);
        add(&mut spec, Path::new("/bundle")).unwrap();
        let once = spec.clone();
        add(&mut spec, Path::new("/bundle")).unwrap();
        assert_eq!(spec, once);
        let value = spec.value();
        assert_eq!(
            value["process"]["env"],
            json!(["PATH=/bin", "CUDA_CHECKPOINT_JOB_FILE=/run/firn-cuda-job"])
        );
        let mounts = value["mounts"].as_array().unwrap();
        assert_eq!(mounts.len(), 2);
        assert_eq!(mounts[1]["destination"], FILE);
        assert_eq!(mounts[1]["source"], "/bundle/firn-cuda-job");
        assert!(spec.mounts().unwrap()[1].is_bind());
    }

    #[test]
    fn another_job_of_the_users_and_a_user_namespace_are_refused() {
        let mut spec = asking(&["CUDA_CHECKPOINT_JOB_FILE=/proc/self/fd/3"]);
        let error = add(&mut spec, Path::new("/bundle")).unwrap_err();
        assert_eq!(error.code(), "FIRN-LAUNCH-JOB");
        assert!(error.to_string().contains("=/proc/self/fd/3,"), "{error}");
        let mut spec = asking(&[]);
        let mounts = &mut spec.object_mut(&[], "mounts").unwrap()["mounts"];
        let mine = json!({"destination": FILE, "source": "/mine", "options": ["bind"]});
        mounts.as_array_mut().unwrap().push(mine);
        assert!(matches!(
            add(&mut spec, Path::new("/bundle")),
            Err(JobError::Taken)
        ));
        let mut spec = asking(&[]);
        let linux = spec.object_mut(&["linux"], "linux").unwrap();
        linux.insert("namespaces".to_owned(), json!([{"type": "user"}]));
        assert!(matches!(
            add(&mut spec, Path::new("/bundle")),
            Err(JobError::UserNamespace)
        ));
    }

    #[test]
    fn a_job_is_what_it_was_in_the_bundle_of_the_restored_container() {
        let (bundle, image, other) = (
            tempfile::tempdir().unwrap(),
            tempfile::tempdir().unwrap(),
            tempfile::tempdir().unwrap(),
        );
        let spec = asking(&[]);
        assert_eq!(of_bundle(&spec, bundle.path()), None);
        std::fs::write(bundle.path().join("firn-cuda-job"), "opaque").unwrap();
        let job = of_bundle(&spec, bundle.path()).unwrap();
        assert_eq!(of_bundle(&Spec::from(json!({})), bundle.path()), None);
        keep(bundle.path(), image.path()).unwrap();
        let mut again = spec.clone();
        assert!(bring(&mut again, Some(&job), image.path(), other.path(), true).unwrap());
        let file = other.path().join("firn-cuda-job");
        assert_eq!(std::fs::read(&file).unwrap(), b"opaque");
        assert_eq!(file.metadata().unwrap().mode() & 0o777, 0o666);
        assert_eq!(of_bundle(&again, other.path()), Some(job));
        assert_eq!(again.mounts().unwrap().len(), 2);
    }

    #[test]
    fn a_job_is_not_brought_where_it_is_not_asked_for_or_not_allowed_or_not_there() {
        let dir = tempfile::tempdir().unwrap();
        let at = |file: &str| LaunchJob { file: file.into() };
        let brought = |mut spec: Spec, was: Option<&LaunchJob>, allowed| {
            bring(&mut spec, was, dir.path(), dir.path(), allowed)
        };
        assert!(
            !brought(asking(&[]), None, true).unwrap(),
            "no job was made of it"
        );
        let plain = Spec::from(json!({}));
        assert!(matches!(
            brought(plain, Some(&at(FILE)), true),
            Err(JobError::NotAsked)
        ));
        let refused = |was: &str, allowed| brought(asking(&[]), Some(&at(was)), allowed).unwrap_err();
        assert!(matches!(refused(FILE, false), JobError::Off));
        assert!(matches!(refused("/etc/passwd", true), JobError::Elsewhere { .. }));
        assert!(matches!(refused(FILE, true), JobError::File { what: "read", .. }));
        std::os::unix::fs::symlink("/etc/passwd", dir.path().join(IN_IMAGE)).unwrap();
        assert!(
            matches!(refused(FILE, true), JobError::File { what: "read", .. }),
            "no link is followed"
        );
        std::fs::remove_file(dir.path().join(IN_IMAGE)).unwrap();
        std::fs::write(dir.path().join(IN_IMAGE), vec![0; (1 << 20) + 1]).unwrap();
        assert!(matches!(refused(FILE, true), JobError::File { what: "read", .. }));
        assert!(
            !dir.path().join("firn-cuda-job").exists(),
            "nothing is left of a refusal"
        );
    }
}
