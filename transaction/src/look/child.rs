//! The process that looks: it reads a request, judges, and prints the answer.
//!
//! It alone opens what a container or a mount server controls. It may hang, and it may be killed at any point: it changes
//! nothing.

use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use firn_host::procfs;
use firn_host::{Problem, ProblemReport};
use firn_oci::{Spec, mounts};
use firn_preflight::environment;
use firn_preflight::environment::{Known, MemoryLimit, Needs, Tree};
use serde::Serialize;

use super::{LeftOut, Request};
use crate::checkpoint::{EffectError, by_signs};
use firn_host::Chain;

/// Longest request: the pids of a host and the mounts of a spec.
const REQUEST: u64 = 16 << 20;

/// Longest message of a refusal.
const MESSAGE: usize = 4 << 10;

/// How many of the processes that are left out are named.
const NAMED: usize = 32;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum ChildError {
    /// The pipes to the shim.
    #[error("cannot read the request or write the answer")]
    Pipe(#[from] io::Error),
    /// Another version's, or typed by hand.
    #[error("the request is not understood")]
    Json(#[from] serde_json::Error),
}

/// Answers the request on standard input.
pub fn run() -> Result<(), ChildError> {
    let mut request = Vec::new();
    io::stdin().take(REQUEST).read_to_end(&mut request)?;
    let answer = answer(serde_json::from_slice(&request)?)?;
    Ok(io::stdout().write_all(&answer)?)
}

fn answer(request: Request) -> serde_json::Result<Vec<u8>> {
    match request {
        Request::Processes {
            init,
            pids,
            cuda,
            policy,
        } => {
            at("the memory maps and environments of processes");
            let tree = Tree::of(init, &pids);
            let dumped: Vec<i32> = tree.dumped.into_iter().collect();
            let refused = environment::by_outside(&tree.outside, &cuda, policy.exec)
                .map_err(EffectError::from)
                .and_then(|()| by_signs(&dumped, &cuda, policy));
            let named = tree.outside.iter().take(NAMED);
            json(refused.map(|()| LeftOut {
                some: named.map(|pid| (*pid, procfs::comm(*pid))).collect(),
                count: tree.outside.len(),
            }))
        }
        Request::Surroundings {
            init,
            pids,
            cuda,
            gpu_memory,
            image,
            work,
            bundle,
        } => {
            let dumped: Vec<i32> = Tree::of(init, &pids).dumped.into_iter().collect();
            json(around(init, &dumped, &cuda, gpu_memory, [&image, &work], &bundle))
        }
        Request::Vendors { pids, nvidia } => {
            json(environment::by_vendor(&pids, nvidia).map_err(EffectError::from))
        }
        Request::InUse { pids, places } => json(Ok::<_, EffectError>(procfs::in_use(&pids, &places))),
        Request::Mounts {
            mounts,
            bundle,
            required,
            version,
            dirs,
            empty,
        } => {
            let spec = Spec::from(serde_json::json!({ "mounts": mounts }));
            let dirs: Vec<&str> = dirs.iter().map(String::as_str).collect();
            let driver = mounts::Driver {
                version: &version,
                dirs: &dirs,
            };
            let all = spec.mounts().into_iter().flatten();
            for source in all
                .filter(|mount| mount.is_bind())
                .map(|mount| bundle.join(mount.source))
            {
                at(&source);
                let _there = source.exists();
            }
            json(mounts::resolve(&spec, &bundle, &required, driver, &empty).map_err(EffectError::from))
        }
    }
}

fn around(
    init: i32,
    dumped: &[i32],
    cuda: &[i32],
    gpu_memory: u64,
    [image, work]: [&PathBuf; 2],
    bundle: &Path,
) -> Result<(), EffectError> {
    at("a file that a process has open or mapped");
    let needs = Needs::of(dumped, gpu_memory);
    let limit = MemoryLimit::of(cuda).map_err(EffectError::Limit)?;
    at(image);
    let refusals = environment::by_room(needs, limit, image, work);
    if let Some(refusal) = refusals.into_iter().next() {
        return Err(refusal.into());
    }
    let known = Known::of(&Spec::load(bundle)?)?;
    environment::by_mounts(init, &known)?;
    at("standard input, output or error of a process");
    Ok(environment::by_stdio(init, dumped)?)
}

/// Says what comes next, for the message in case that it hangs.
fn at(what: impl AsRef<Path>) {
    eprintln!("{}", what.as_ref().display());
}

/// The answer as the shim reads it.
fn json<T: Serialize>(answer: Result<T, EffectError>) -> serde_json::Result<Vec<u8>> {
    let answer = answer.map_err(|error| {
        let mut message = Chain(&error).to_string();
        message.truncate(message.floor_char_boundary(MESSAGE));
        ProblemReport {
            message,
            ..error.report()
        }
    });
    serde_json::to_vec(&answer)
}
