//! The child process of a look: reads a request, answers it on standard output, and ends.
//!
//! It opens files that a container or a file server controls, so it may hang and be killed at any point. It
//! changes nothing.

use std::io::{self, Read, Write};
use std::path::Path;

use firn_host::{ProblemReport, procfs};
use firn_oci::{Spec, mounts};
use firn_preflight::{Workload, check_until_refused};
use serde::Serialize;

use super::written::written;
use super::{Checked, LeftOut, Request};

/// Longest request: the pids of a host and the mounts of a spec.
const REQUEST: u64 = 16 << 20;

/// Longest message of a refusal.
const MESSAGE: usize = 4 << 10;

/// How many of the processes that CRIU leaves out are named.
const NAMED: usize = 32;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum ChildError {
    /// The pipes to the shim failed.
    #[error("cannot read the request or write the answer")]
    Pipe(#[from] io::Error),
    /// The request is of another version, or typed by hand.
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

/// A refusal, or a failure to look.
type Answer<T> = Result<T, ProblemReport>;

fn answer(request: Request) -> serde_json::Result<Vec<u8>> {
    match request {
        Request::Check(workload) => json(check(&workload)),
        Request::InUse { pids, places } => json(Ok(procfs::in_use(&pids, &places))),
        Request::Written { init, pids, since } => json(Ok(written(init, &pids, since))),
        Request::Mounts {
            mounts,
            bundle,
            required,
            device_free,
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
                announce(&source);
                let _exists = source.exists();
            }
            let needs = mounts::Needs {
                mounts: &required,
                device_free,
            };
            let resolved = mounts::resolve(&spec, &bundle, needs, driver, &empty);
            json(resolved.map_err(ProblemReport::from))
        }
    }
}

/// The first refusal, or what the checkpoint needs to know about a workload that passes.
fn check(workload: &Workload) -> Answer<Checked> {
    let outcome = check_until_refused(workload, &announce)?;
    if let Some(refusal) = outcome.refusals.into_iter().next() {
        return Err(refusal.into());
    }
    let named = outcome.left_out.iter().take(NAMED);
    Ok(Checked {
        left_out: LeftOut {
            some: named.map(|pid| (*pid, procfs::comm(*pid))).collect(),
            count: outcome.left_out.len(),
        },
        other_gpus: outcome.other_gpus,
        inherited: outcome.inherited,
        is_starting: !outcome.starting.is_empty(),
        link_remap: outcome.link_remap,
        watched: outcome.watched,
        unix_sockets: outcome.unix_sockets,
    })
}

/// Prints what the child looks at next, for the message in case it hangs there.
fn announce(what: &Path) {
    eprintln!("{}", what.display());
}

/// The answer as the shim reads it.
fn json<T: Serialize>(mut answer: Answer<T>) -> serde_json::Result<Vec<u8>> {
    if let Err(ProblemReport { message, .. }) = &mut answer {
        message.truncate(message.floor_char_boundary(MESSAGE));
    }
    serde_json::to_vec(&answer)
}

#[cfg(test)]
mod tests {
    use firn_host::Problem;
    use firn_preflight::{Assertions, Capacity};

    use super::*;

    /// Workloads made of a process: each is refused for another reason, or passes.
    fn workloads(init: i32) -> Vec<(Workload, Option<&'static str>)> {
        let base = Workload {
            init,
            pids: vec![init],
            ..Workload::default()
        };
        let processes = |pids: &[i32], cuda: &[i32]| Workload {
            pids: pids.to_vec(),
            cuda: cuda.to_vec(),
            processes: Some(Assertions::default()),
            ..base.clone()
        };
        let capacity = Capacity {
            gpu_memory: u64::MAX,
            stored: false,
            image: "/tmp".into(),
            work: "/tmp".into(),
        };
        vec![
            (base.clone(), None),
            (processes(&[init], &[]), None),
            (processes(&[init, 1], &[]), Some("FIRN-EXEC")),
            (processes(&[init, 1], &[1]), Some("FIRN-EXEC")),
            (
                Workload {
                    capacity: Some(capacity),
                    ..base.clone()
                },
                Some("FIRN-HOST-MEMORY"),
            ),
            (
                Workload {
                    bundle: Some("/nonexistent".into()),
                    ..base
                },
                Some("FIRN-SPEC-UNREADABLE"),
            ),
        ]
    }

    #[test]
    fn the_child_reports_the_first_refusal_that_the_audit_shows() {
        // Not this process: other tests have sockets in it.
        let null = std::process::Stdio::null;
        let mut command = std::process::Command::new("sleep");
        command.arg("1000").stdin(null()).stdout(null()).stderr(null());
        // Also when the test fails.
        firn_process::sys::die_with_parent(&mut command);
        let mut sleeper = command.spawn().unwrap();
        for (workload, code) in workloads(i32::try_from(sleeper.id()).unwrap()) {
            let request = serde_json::to_vec(&Request::Check(Box::new(workload.clone()))).unwrap();
            let answer = answer(serde_json::from_slice(&request).unwrap()).unwrap();
            let answer: Answer<Checked> = serde_json::from_slice(&answer).unwrap();
            let shown = match firn_preflight::check(&workload) {
                Ok(outcome) => outcome.refusals.first().map(Problem::report),
                Err(error) => Some(error.report()),
            };
            let code_of = |report: &Option<ProblemReport>| report.as_ref().map(|r| r.code.clone());
            assert_eq!(code_of(&shown).as_deref(), code, "{workload:?}");
            // Figures of the host change between the two checks.
            assert_eq!(code_of(&answer.err()), code_of(&shown), "{workload:?}");
        }
        sleeper.kill().unwrap();
        // The reaper of another test in this process may have it.
        let _reaped = sleeper.wait();
    }
}
