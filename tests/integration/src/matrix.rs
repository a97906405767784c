//! The harness of all suites: a suite lists its cases once, each with the platforms that it runs on.
//!
//! Every pair of them is a trial of its own, `suite::name [forky v2]`, which `cargo suites PART` picks: all
//! words of the part are in its name. A trial that cannot run on this machine returns [`Skip`]: it counts as
//! ignored, and a line `skipped: REASON` is printed, which `cargo xtask test` shows at the end.

use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZero;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::process::ExitCode;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Error, Result, anyhow};
use firn_node::Platform;
use libtest_mimic::{Arguments, Completion, Failed};

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
        tier.platforms(self.platforms).map(move |platform| Trial {
            ignored: self.ignored,
            ..trial(name(self.name, platform), move || (self.test)(platform))
        })
    }
}

/// A test that has a name and may be skipped while it runs; [`trial`] makes it.
pub struct Trial {
    name: String,
    test: Box<dyn FnOnce() -> Result<()> + Send>,
    ignored: bool,
}

/// The trials of a suite, and what is looked at when all suites have ended.
pub struct Suite {
    trials: Vec<Trial>,
    begins: Begins,
    at_end: Option<Box<dyn FnOnce() -> Result<()>>>,
}

/// When the trials of a suite begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Begins {
    First,
    /// Spread evenly, so that trials of a suite that share hosts seldom wait for each other.
    Spread,
    Last,
}

impl Suite {
    /// Of these cases, as many as the tier has.
    pub fn new(cases: &[Case]) -> Self {
        let tier = Tier::current();
        Self {
            trials: cases.iter().flat_map(|case| case.trials(tier)).collect(),
            begins: Begins::Spread,
            at_end: None,
        }
    }

    /// With other trials, too.
    pub fn with(mut self, trials: impl IntoIterator<Item = Trial>) -> Self {
        self.trials.extend(trials);
        self
    }

    /// Left out of what a commit has to pass.
    pub fn only_in_all(self) -> Self {
        let trials = match Tier::current() {
            Tier::Commit => Vec::new(),
            Tier::All => self.trials,
        };
        Self { trials, ..self }
    }

    /// Begins before all others: its trials are the longest, and at the end nothing would run next to them.
    pub fn first(self) -> Self {
        let begins = Begins::First;
        Self { begins, ..self }
    }

    /// Begins when the rest is almost done: it measures time.
    pub fn last(self) -> Self {
        let begins = Begins::Last;
        Self { begins, ..self }
    }

    /// Fails the run by its error, when all trials have ended.
    pub fn at_end(self, check: impl FnOnce() -> Result<()> + 'static) -> Self {
        let at_end: Box<dyn FnOnce() -> Result<()>> = Box::new(check);
        Self {
            at_end: Some(at_end),
            ..self
        }
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
    Trial {
        name,
        test: Box::new(test),
        ignored: false,
    }
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

/// One more than there are CPUs: trials wait half of their time, mostly for programs that wait too. No more
/// than six, as each has one or two nodes in memory.
fn at_a_time() -> usize {
    let cpus = std::thread::available_parallelism().map_or(1, NonZero::get);
    (cpus + 1).clamp(2, 6)
}

/// How long each trial took that did not fail: suite, trial, time.
type Times = Mutex<Vec<(&'static str, String, Duration)>>;

/// The main function of a program of suites: runs the trials that the command line picks, several at a time,
/// in one queue. Their names begin with their suite's, as in `moves::a_process_moves [forky]`.
pub fn run(suites: impl IntoIterator<Item = (&'static str, Suite)>) -> ExitCode {
    let tier = Tier::current();
    let times = Arc::new(Times::default());
    let (mut planned, mut at_end, mut groups) = (BTreeMap::new(), Vec::new(), Vec::new());
    for (name, suite) in suites {
        planned.insert(name, suite.trials.len());
        at_end.extend(suite.at_end);
        let trials = suite.trials.into_iter();
        let trials: Vec<_> = trials.map(|trial| entry(name, trial, &times)).collect();
        groups.push((suite.begins, trials));
    }
    let mut arguments = Arguments::from_args();
    arguments.test_threads.get_or_insert_with(at_a_time);
    if !arguments.exact
        && let Some(filter) = arguments.filter.take()
    {
        for (_, trials) in &mut groups {
            trials.retain(|trial: &libtest_mimic::Trial| is_picked(trial.name(), &filter));
        }
    }
    let conclusion = libtest_mimic::run(&arguments, queue(groups));
    if arguments.list {
        return ExitCode::SUCCESS;
    }
    let times = times.lock().unwrap_or_else(PoisonError::into_inner);
    print!("{}", table(&times));
    let whole = planned.into_iter().filter(|(suite, count)| {
        let passed = times.iter().filter(|(of, ..)| of == suite).count();
        // A page may claim what only a run of all has seen.
        tier == Tier::All && passed == *count
    });
    let claimed = whole.map(|(suite, _)| claims::nothing_else_is_claimed(suite));
    let ends = claimed.chain(at_end.into_iter().map(|check| check()));
    let errors: Vec<Error> = ends.filter_map(Result::err).collect();
    for error in &errors {
        eprintln!("error: {error:#}");
    }
    if errors.is_empty() {
        conclusion.exit_code()
    } else {
        ExitCode::FAILURE
    }
}

/// Whether a name has all words of a filter: a suite, a part of a case, a platform.
fn is_picked(name: &str, filter: &str) -> bool {
    filter.split_whitespace().all(|word| name.contains(word))
}

/// The trial as the harness takes it.
fn entry(suite: &'static str, trial: Trial, times: &Arc<Times>) -> libtest_mimic::Trial {
    let Trial { name, test, ignored } = trial;
    let (kept, times) = (name.clone(), Arc::clone(times));
    let run = move || {
        let begun = Instant::now();
        let ended = within(LIMIT, move || claims::of_suite(suite, test));
        if ended.is_ok() {
            let mut times = times.lock().unwrap_or_else(PoisonError::into_inner);
            times.push((suite, kept, begun.elapsed()));
        }
        completion(ended)
    };
    libtest_mimic::Trial::ignorable_test(format!("{suite}::{name}"), run).with_ignored_flag(ignored)
}

/// One queue of all: each group's order is kept, and groups that are spread are so from begin to end.
fn queue<T>(groups: Vec<(Begins, Vec<T>)>) -> Vec<T> {
    let mut placed = Vec::new();
    for (begins, trials) in groups {
        let count = trials.len();
        let place = |(at, trial)| (begins, (2 * at + 1, 2 * count), trial);
        placed.extend(trials.into_iter().enumerate().map(place));
    }
    // Fractions, compared without rounding.
    placed.sort_by(|(begins, (a, of_a), _), (other, (b, of_b), _)| {
        begins.cmp(other).then((a * of_b).cmp(&(b * of_a)))
    });
    placed.into_iter().map(|(_, _, trial)| trial).collect()
}

/// A line per suite: how long its trials took, one after the other, and which was the longest.
fn table(times: &[(&'static str, String, Duration)]) -> String {
    let mut suites = BTreeMap::<_, Vec<_>>::new();
    for (suite, trial, took) in times {
        suites.entry(suite).or_default().push((took, trial));
    }
    let line = |(suite, trials): (&&str, Vec<(&Duration, &String)>)| {
        let sum: Duration = trials.iter().map(|(took, _)| **took).sum();
        let (longest, name) = trials.iter().max()?;
        let (sum, longest, count) = (sum.as_secs_f32(), longest.as_secs_f32(), trials.len());
        Some(format!(
            "suite {suite}: {sum:.1} s, {count} passed, the longest {longest:.1} s: {name}\n"
        ))
    };
    suites.into_iter().filter_map(line).collect()
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
        let names: Vec<_> = trials.iter().map(|trial| &*trial.name).collect();
        assert_eq!(
            names,
            [
                "proved [forky]",
                "proved [trixie v2]",
                "self::proved [forky v2 systemd]"
            ]
        );
        let ignored: Vec<_> = trials.iter().map(|trial| trial.ignored).collect();
        assert_eq!(ignored, [false, false, true]);
    }

    #[test]
    fn a_filter_picks_names_by_words() {
        let name = "moves::four_processes_move [forky v2]";
        for filter in ["moves::", "moves:: [forky", "four [forky v2]", ""] {
            assert!(is_picked(name, filter), "{filter}");
        }
        assert!(!is_picked(name, "moves:: [forky]"));
        assert!(!is_picked(name, "pauses:: four"));
    }

    #[test]
    fn trials_of_a_suite_are_spread_over_the_queue() {
        let queue = |groups: &[(Begins, &str)]| {
            let groups = groups
                .iter()
                .map(|(begins, trials)| (*begins, trials.chars().collect()));
            queue(groups.collect()).into_iter().collect::<String>()
        };
        let (first, spread, last) = (Begins::First, Begins::Spread, Begins::Last);
        assert_eq!(
            queue(&[(last, "xy"), (spread, "abc"), (first, "long")]),
            "longabcxy"
        );
        assert_eq!(
            queue(&[(spread, "abcdef"), (spread, "12"), (spread, "-")]),
            "ab1c-de2f"
        );
        assert_eq!(queue(&[(spread, ""), (spread, "1")]), "1");
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
