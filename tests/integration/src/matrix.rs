//! The harness of all suites: a suite lists its cases once, each with the platforms that it runs on.
//!
//! Every pair of them is a trial of its own, `name [forky v2]`, which `cargo test --test SUITE -- PART OF THE
//! NAME` picks. A trial that cannot run on this machine returns [`Skip`]: it counts as ignored, and a line
//! `skipped: REASON` is printed, which `cargo xtask test` shows at the end.

use std::fmt;
use std::num::NonZero;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::process::ExitCode;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use anyhow::{Error, Result, anyhow};
use firn_node::Platform;
use libtest_mimic::{Arguments, Completion, Conclusion, Failed, Trial};

use crate::{GpuHost, Tier, claims};

/// Environment variable that keeps the nodes of trials that fail.
const KEEP: &str = "FIRN_KEEP";

/// How long a trial may take: ten times as long as most, also on a machine with other work.
const LIMIT: Duration = Duration::from_secs(30 * 60);

/// A case of a suite; [`cases`](crate::cases) makes it.
#[derive(Clone, Copy)]
pub struct Case {
    /// What it proves.
    pub name: &'static str,
    /// Where it runs.
    pub platforms: &'static [Platform],
    /// Proves it there.
    pub test: fn(Platform) -> Result<()>,
    /// Why it runs only when it is asked for with `--ignored`.
    pub ignored: bool,
}

impl Case {
    fn trials(self, tier: Tier) -> impl Iterator<Item = Trial> {
        let platforms = self.platforms.iter();
        let platforms = platforms.filter(move |platform| tier.includes(**platform, self.platforms));
        platforms.map(move |platform| {
            trial(name(self.name, platform), move || (self.test)(*platform)).with_ignored_flag(self.ignored)
        })
    }
}

/// The cases of a suite: `cases! { name_of_a_function [FORKY, TRIXIE_V2]; ... }`, with constants of
/// [`Platform`]. After `ignored` a case runs only with `--ignored`.
#[macro_export]
macro_rules! cases {
    (@ignored) => { false };
    (@ignored ignored) => { true };
    ($($test:path [$($platform:ident),+ $(,)?] $($ignored:ident)?;)+) => {
        [$($crate::Case {
            name: stringify!($test),
            platforms: &[$($crate::Platform::$platform),+],
            test: $test,
            ignored: $crate::cases!(@ignored $($ignored)?),
        }),+]
    };
}

/// The name of a trial.
pub fn name(case: &str, platform: impl fmt::Display) -> String {
    format!("{case} [{platform}]")
}

/// A trial that may be skipped while it runs. Whatever it waits for, it ends.
pub fn trial(name: String, test: impl FnOnce() -> Result<()> + Send + 'static) -> Trial {
    Trial::ignorable_test(name, move || completion(within(LIMIT, test)))
}

/// What a test returns, or an error once the limit has passed. Its thread and its nodes are then left alone:
/// they end with this program.
fn within(limit: Duration, test: impl FnOnce() -> Result<()> + Send + 'static) -> Result<()> {
    let (sender, ended) = mpsc::channel();
    let running = thread::spawn(move || {
        let result = catch_unwind(AssertUnwindSafe(test));
        // Nobody listens to one that is late.
        let _ = sender.send(result);
    });
    match ended.recv_timeout(limit) {
        Ok(result) => {
            let _ = running.join();
            result.unwrap_or_else(|panic| resume_unwind(panic))
        }
        Err(RecvTimeoutError::Timeout) => Err(anyhow!("no end within {} s", limit.as_secs_f32())),
        Err(RecvTimeoutError::Disconnected) => Err(anyhow!("the thread of the trial has gone")),
    }
}

fn completion(ended: Result<()>) -> Result<Completion, Failed> {
    match ended {
        Ok(()) => Ok(Completion::Completed),
        Err(error) => match error.downcast_ref::<Skip>() {
            Some(skip) => {
                // On a line of its own, also after a trial's name that waits for its end.
                println!("\nskipped: {skip}");
                Ok(Completion::ignored_with(skip))
            }
            None => Err(failed(&error)),
        },
    }
}

fn failed(error: &Error) -> Failed {
    Failed::from(format!("{error:#}"))
}

/// A trial that needs no node.
pub fn without_node(name: &str, test: fn() -> Result<()>) -> Trial {
    trial(name.to_owned(), test)
}

/// Runs the trials that the command line picks, several at a time.
pub fn run_trials(trials: Vec<Trial>) -> Conclusion {
    let mut arguments = Arguments::from_args();
    arguments.test_threads.get_or_insert_with(at_a_time);
    libtest_mimic::run(&arguments, trials)
}

/// One more than there are CPUs: trials wait half of their time, mostly for programs that wait too. No more
/// than six, as each has one or two nodes in memory.
fn at_a_time() -> usize {
    let cpus = std::thread::available_parallelism().map_or(1, NonZero::get);
    (cpus + 1).clamp(2, 6)
}

/// The main function of a suite.
pub fn run(cases: &[Case]) -> ExitCode {
    run_with(cases, [])
}

/// The main function of a suite that has other trials too.
pub fn run_with(cases: &[Case], others: impl IntoIterator<Item = Trial>) -> ExitCode {
    let tier = Tier::current();
    let trials = cases.iter().flat_map(|case| case.trials(tier));
    let conclusion = run_trials(trials.chain(others).collect());
    // A page may claim what only a run of all has seen.
    let claimed = if tier == Tier::All {
        claims::nothing_else_is_claimed(&conclusion)
    } else {
        Ok(())
    };
    match claimed {
        Ok(()) => conclusion.exit_code(),
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs a story on these nodes. When it fails, what containerd logged on them is printed.
pub fn on<const N: usize>(
    mut hosts: [GpuHost; N],
    story: impl FnOnce(&mut [GpuHost; N]) -> Result<()>,
) -> Result<()> {
    let ended = catch_unwind(AssertUnwindSafe(|| story(&mut hosts)));
    let failed = match &ended {
        Ok(Ok(())) => false,
        Ok(Err(error)) => !error.is::<Skip>(),
        Err(_) => true,
    };
    if failed {
        hosts.iter().for_each(|host| eprintln!("{}", host.log()));
        if std::env::var_os(KEEP).is_some() {
            for host in hosts {
                eprintln!("kept: cargo xtask node shell {}", host.node().name());
                host.leave()?;
            }
        }
    }
    ended.unwrap_or_else(|panic| resume_unwind(panic))
}

/// Why a trial cannot run on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Skip(String);

impl Skip {
    /// For this reason.
    pub fn new(reason: impl Into<String>) -> Self {
        Self(reason.into())
    }
}

impl fmt::Display for Skip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Skip {}

#[cfg(test)]
mod tests {
    use anyhow::Context;

    use super::*;

    fn proved(_: Platform) -> Result<()> {
        Ok(())
    }

    #[test]
    fn every_case_has_a_trial_per_platform() {
        let cases = cases! {
            proved [FORKY, TRIXIE_V2];
            self::proved [FORKY_SYSTEMD] ignored;
        };
        let trials = cases.into_iter().flat_map(|case| case.trials(Tier::All));
        let trials: Vec<_> = trials.collect();
        let names: Vec<_> = trials.iter().map(Trial::name).collect();
        assert_eq!(
            names,
            [
                "proved [forky]",
                "proved [trixie v2]",
                "self::proved [forky v2 systemd]"
            ]
        );
        let ignored: Vec<_> = trials.iter().map(Trial::has_ignored_flag).collect();
        assert_eq!(ignored, [false, false, true]);
    }

    #[test]
    fn a_trial_that_waits_for_ever_fails() {
        let (never, waits) = mpsc::channel::<()>();
        let late = within(Duration::from_millis(20), move || Ok(waits.recv()?));
        assert!(late.unwrap_err().to_string().contains("no end within"));
        drop(never);
        let long = Duration::from_secs(60);
        assert!(within(long, || Ok(())).is_ok());
        assert!(
            within(long, || Err(Skip::new("no Go here").into()))
                .unwrap_err()
                .is::<Skip>()
        );
        let panics = catch_unwind(|| within(long, || panic!("a failed invariant")));
        assert!(panics.is_err());
    }

    #[test]
    fn a_skipped_trial_is_neither_passed_nor_failed() {
        let skipped = || Err(Skip::new("no Go here").into());
        let is_ignored = |ended| matches!(completion(ended), Ok(Completion::Ignored { reason: Some(_) }));
        assert!(is_ignored(skipped()));
        assert!(is_ignored(skipped().context("on a node")));
        assert!(matches!(completion(Ok(())), Ok(Completion::Completed)));
        let wrong = Err(anyhow::anyhow!("wrong")).context("on a node");
        let failed = completion(wrong).err().unwrap();
        assert_eq!(failed.message(), Some("on a node: wrong"));
    }
}
