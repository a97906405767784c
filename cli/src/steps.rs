//! What a command does, for a person who waits: each phase when it ends, and a long one while it lasts.

use std::pin::pin;
use std::time::{Duration, Instant};

use serde::Serialize;
use tokio::time::interval;

use crate::containerd::{Containerd, Phase};
use crate::output::note;
use crate::text;

/// How often a person sees that it is still under way.
const TICK: Duration = Duration::from_secs(2);

/// A phase of a command, which has ended.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Step<'a> {
    /// Its name: that of a phase of the transaction, or of what the command does, as `pause` or `send`.
    name: &'a str,
    /// How long it took, in milliseconds.
    ms: u64,
}

/// The phases of a command, with their times.
pub struct Steps {
    quiet: bool,
    done: Vec<(String, Duration)>,
    current: Option<(String, Instant)>,
    shown: Instant,
}

impl Steps {
    /// `quiet`: nothing is printed.
    pub fn new(quiet: bool) -> Self {
        Self {
            quiet,
            done: Vec::new(),
            current: None,
            shown: Instant::now(),
        }
    }

    /// Ends the phase before, and begins this one.
    pub fn begin(&mut self, name: &str) {
        self.end();
        self.current = Some((name.to_owned(), Instant::now()));
        self.shown = Instant::now();
    }

    /// Ends the phase.
    pub fn end(&mut self) {
        if let Some((name, begun)) = self.current.take() {
            let took = begun.elapsed();
            self.show(|| format!("{name}: {:.1} s", took.as_secs_f64()));
            self.done.push((name, took));
        }
    }

    /// So many bytes are copied, of so many; 0 if that is not known.
    pub fn show_copied(&mut self, done: u64, all: u64) {
        if self.shown.elapsed() < TICK {
            return;
        }
        self.shown = Instant::now();
        if let Some((name, begun)) = &self.current {
            let text = copied(name, begun.elapsed(), done, all);
            self.show(|| text);
        }
    }

    fn show(&self, text: impl FnOnce() -> String) {
        if !self.quiet {
            note!("firn: {}", text());
        }
    }

    /// Whether one of these phases has begun.
    pub fn have_begun(&self, any: &[&str]) -> bool {
        let current = self.current.iter().map(|(name, _)| name);
        let mut all = self.done.iter().map(|(name, _)| name).chain(current);
        all.any(|name| any.contains(&&**name))
    }

    /// Those that have ended, in their order.
    pub fn ended(&self) -> Vec<Step<'_>> {
        let done = self.done.iter();
        done.map(|(name, took)| Step {
            name,
            ms: text::ms(*took),
        })
        .collect()
    }

    /// Does `work` on a container, whose phases firn's shim publishes meanwhile.
    pub async fn follow<T>(
        &mut self,
        containerd: &Containerd,
        namespace: &str,
        id: &str,
        work: impl Future<Output = T>,
    ) -> T {
        let mut work = pin!(work);
        let mut ticks = interval(TICK);
        ticks.tick().await;
        let events = events(containerd);
        let mut events = pin!(events);
        let mut phases = None;
        loop {
            tokio::select! {
                biased;
                done = &mut work => return done,
                opened = &mut events, if phases.is_none() => phases = Some(opened),
                phase = next(&mut phases) => self.enter(&phase, namespace, id),
                _ = ticks.tick() => self.tick(),
            }
        }
    }

    fn enter(&mut self, phase: &Phase, namespace: &str, id: &str) {
        if phase.namespace != namespace || phase.container != id || phase.is_end() {
            return;
        }
        let is_new = self.current.as_ref().is_none_or(|(name, _)| *name != phase.name);
        if is_new {
            self.begin(&phase.name);
        }
        let (done, all) = phase.copied;
        if done > 0 {
            self.show_copied(done, all);
        }
    }

    fn tick(&mut self) {
        if self.shown.elapsed() < TICK {
            return;
        }
        if let Some((name, begun)) = &self.current {
            let text = format!("{name}: {} s", begun.elapsed().as_secs());
            self.show(|| text);
        }
    }
}

type Events = Option<crate::containerd::Phases>;

/// None: there are none to be had, which prevents nothing.
async fn events(containerd: &Containerd) -> Events {
    containerd.phases().await.ok()
}

async fn next(phases: &mut Option<Events>) -> Phase {
    if let Some(Some(open)) = phases
        && let Ok(Some(phase)) = open.next().await
    {
        return phase;
    }
    if phases.is_some() {
        *phases = Some(None);
    }
    std::future::pending().await
}

fn copied(name: &str, took: Duration, done: u64, all: u64) -> String {
    let seconds = took.as_secs_f64();
    let rate = text::rate(done, seconds);
    if all == 0 {
        return format!("{name}: {}, {rate}", text::bytes(done));
    }
    // Shown alone: what is lost in the conversion does not matter.
    #[allow(clippy::cast_precision_loss)]
    let left = seconds * all.saturating_sub(done) as f64 / done.max(1) as f64;
    format!(
        "{name}: {} of {}, {rate}, {left:.0} s left",
        text::bytes(done),
        text::bytes(all)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_has_its_rate_and_an_estimate() {
        let shown = copied("copy", Duration::from_secs(2), 1 << 30, 4 << 30);
        assert_eq!(shown, "copy: 1.0 GiB of 4.0 GiB, 512.0 MiB/s, 6 s left");
        let shown = copied("copy", Duration::from_secs(2), 1 << 30, 0);
        assert_eq!(shown, "copy: 1.0 GiB, 512.0 MiB/s");
    }

    #[test]
    fn phases_follow_each_other() {
        let mut steps = Steps::new(true);
        let phase = |name: &str, id: &str| Phase {
            namespace: "default".to_owned(),
            container: id.to_owned(),
            name: name.to_owned(),
            copied: (0, 0),
        };
        steps.begin("pause");
        for (name, id) in [
            ("gpu-lock", "job"),
            ("gpu-lock", "other"),
            ("criu-dump", "job"),
            ("criu-dump", "job"),
            ("failed: FIRN-DUMP", "job"),
            ("done", "job"),
        ] {
            steps.enter(&phase(name, id), "default", "job");
        }
        steps.end();
        let names: Vec<&str> = steps.done.iter().map(|(name, _)| &**name).collect();
        assert_eq!(names, ["pause", "gpu-lock", "criu-dump"]);
    }
}
