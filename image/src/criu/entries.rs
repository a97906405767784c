//! What lies in the image directory, whatever its content is.

use std::os::unix::fs::MetadataExt;

use firn_config::names;
use serde_json::Value;

use super::{Image, ImageFault};
use crate::checksums::{PARENT, is_of_image};

/// Files of images that are older than what is read here. CRIU would use them if a task's own file lacks the
/// fields.
const OLD: [&str; 2] = ["creds-", "rlimit-"];

/// Policies of AppArmor, which CRIU would load into the kernel.
const APPARMOR: &str = "apparmor.img";

/// How many standard streams a container has.
const STREAMS: usize = 3;

/// Every file that CRIU or the runtime opens is a regular file with one name, and none is of a kind that no
/// checkpoint of a container has.
pub(super) fn check(image: &Image) -> Result<(), ImageFault> {
    let names = image.dir.names();
    for name in names.map_err(|source| ImageFault::unreadable("the directory", &source))? {
        if !is_of_image(&name) && name != PARENT {
            continue;
        }
        let found = image.dir.metadata(&name);
        let found = found.map_err(|source| ImageFault::unreadable(&name, &source))?;
        let unfit = |reason: &str| ImageFault::Unreadable {
            file: super::shown(&name),
            reason: reason.to_owned(),
        };
        if name == PARENT {
            return Err(unfit("CRIU would look for memory in another directory"));
        }
        if !found.is_file() {
            return Err(unfit("not a regular file"));
        }
        if found.nlink() > 1 {
            let reason = "the file has other names, by which it can be changed meanwhile";
            return Err(unfit(reason));
        }
        if name == APPARMOR {
            let what = "a policy of AppArmor";
            return Err(ImageFault::exceeds(&name, what, "there", "none"));
        }
        if OLD.iter().any(|old| name.starts_with(old)) {
            let reason = "only images older than CRIU 3.15 have it";
            return Err(ImageFault::malformed(&name, reason));
        }
    }
    streams(image)
}

/// runc passes CRIU its own descriptors of these numbers for the pipes that are named here. Those above the
/// standard streams are the runtime's and CRIU's own.
fn streams(image: &Image) -> Result<(), ImageFault> {
    const NAME: &str = names::RUNC_DESCRIPTORS;
    // runc's file: other runtimes write none, and runc does not restore without it.
    let Some(bytes) = image.bytes(NAME)? else {
        return Ok(());
    };
    let named: Value = serde_json::from_slice(&bytes).map_err(|error| ImageFault::malformed(NAME, error))?;
    let named = named.as_array().map_or(&[][..], Vec::as_slice);
    let is_fit = named.len() <= STREAMS && named.iter().all(Value::is_string);
    let fault = || ImageFault::exceeds(NAME, "the number of streams", named.len(), STREAMS);
    is_fit.then_some(()).ok_or_else(fault)
}
