//! The freezer: stops and resumes all processes of a cgroup at once, without signals.
//!
//! All calls may be repeated, and end in a known state: a [`Cgroup::freeze`] that does not succeed in time
//! thaws the cgroup; a [`Cgroup::keep_frozen`] leaves it freezing, where each thread stops as soon as it can.
//! A dropped future leaves the cgroup freezing; the caller has to thaw it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::read::{self, FlatKeyed};
use super::{Cgroup, CgroupError, Version};
use crate::blocking::blocking;

/// First pause between two reads of the state. It doubles up to [`SLOWEST`].
const FASTEST: Duration = Duration::from_millis(1);

/// Longest pause between two reads of the state.
const SLOWEST: Duration = Duration::from_millis(16);

/// v1 may never finish freezing a cgroup in which processes are forked all the time. After this time the
/// cgroup is thawed for a moment, so that the fork that the freezer missed completes.
const V1_KICK: Duration = Duration::from_millis(500);

/// How long v1 is thawed for that.
const V1_KICK_PAUSE: Duration = Duration::from_millis(10);

/// How long a freeze is repeated until the moment is fit.
const MOMENT: Duration = Duration::from_millis(500);

/// How long the processes run before they are frozen again.
const PAUSE: Duration = Duration::from_millis(5);

/// Whether a v1 freezer that does not finish may be thawed for a moment.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kick {
    Allowed,
    Never,
}

/// State of the freezer, including frozen parents: `Frozen` means that no process of the cgroup can run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FreezerState {
    /// Processes run.
    Thawed,
    /// Freezing was requested; some processes still run.
    Freezing,
    /// All processes are stopped.
    Frozen,
}

/// The kernel counts in whole microseconds.
const ROUNDED: Duration = Duration::from_micros(2);

/// A look at the freezer.
#[derive(Clone, Copy, Debug)]
pub struct Still {
    state: FreezerState,
    /// For how long the cgroup has been frozen altogether, read between `from` and `until`.
    frozen: Option<Duration>,
    from: std::time::Instant,
    until: std::time::Instant,
}

impl Still {
    /// What shows that processes have run since an earlier look; none if nothing does. Time in which the
    /// cgroup was not frozen is missing in the kernel's count: that finds a thaw which is over, too.
    pub fn unlike(&self, earlier: &Self) -> Option<String> {
        match self.state {
            FreezerState::Frozen => {}
            FreezerState::Thawed => return Some("somebody has turned its freezer off".to_owned()),
            FreezerState::Freezing => return Some("a thread does not stop".to_owned()),
        }
        let frozen = self.frozen?.saturating_sub(earlier.frozen?);
        let passed = self.from.saturating_duration_since(earlier.until);
        let missing = passed.saturating_sub(frozen + ROUNDED);
        (!missing.is_zero()).then(|| format!("it was thawed for {} us meanwhile", missing.as_micros()))
    }
}

impl Cgroup {
    /// The freezer's current state.
    pub fn freezer_state(&self) -> Result<FreezerState, CgroupError> {
        let dir = self.freezer_dir()?;
        match self.version {
            Version::V1 => v1_state(&dir),
            Version::V2 => v2_state(&dir),
        }
    }

    /// Freezes all processes. Returns at once if there are none.
    pub async fn freeze(&self, limit: Duration) -> Result<(), CgroupError> {
        let dir = self.own_freezer_dir()?;
        let before = self.freezer_state()?;
        let frozen = self.try_freeze(&dir, limit, Kick::Allowed).await;
        if matches!(frozen, Err(CgroupError::FreezeTimeout { .. })) && before == FreezerState::Thawed {
            self.order(&dir, FreezerState::Thawed)?;
        }
        frozen
    }

    /// Freezes them at a moment that `is_fit` accepts, by their pids, if there is one within [`MOMENT`]. A
    /// cgroup that is frozen already is thawed for moments if it has to be.
    pub async fn freeze_when(&self, is_fit: fn(&[i32]) -> bool, limit: Duration) -> Result<(), CgroupError> {
        let until = Instant::now() + MOMENT;
        self.freeze(limit).await?;
        loop {
            let pids = self.pids()?;
            if Instant::now() >= until || blocking(move || is_fit(&pids)).await {
                return Ok(());
            }
            self.thaw(limit).await?;
            sleep(PAUSE).await;
            self.freeze(limit).await?;
        }
    }

    /// Freezes processes of which none may run: never thaws, not even for the moment that lets a v1 freezer
    /// finish.
    pub async fn keep_frozen(&self, limit: Duration) -> Result<(), CgroupError> {
        self.try_freeze(&self.own_freezer_dir()?, limit, Kick::Never)
            .await
    }

    /// Requests freezing and does not wait for the threads to stop.
    pub fn begin_freeze(&self) -> Result<(), CgroupError> {
        self.order(&self.own_freezer_dir()?, FreezerState::Frozen)
    }

    async fn try_freeze(&self, dir: &Path, limit: Duration, kick: Kick) -> Result<(), CgroupError> {
        let begun = Instant::now();
        let mut kick_at = begun + V1_KICK;
        let mut pause = FASTEST;
        self.order(dir, FreezerState::Frozen)?;
        while self.freezer_state()? != FreezerState::Frozen {
            if begun.elapsed() >= limit {
                return Err(CgroupError::FreezeTimeout {
                    path: dir.to_owned(),
                    limit,
                });
            }
            if self.version == Version::V1 {
                if kick == Kick::Allowed && Instant::now() >= kick_at {
                    self.order(dir, FreezerState::Thawed)?;
                    sleep(V1_KICK_PAUSE).await;
                    kick_at = Instant::now() + V1_KICK;
                }
                self.order(dir, FreezerState::Frozen)?;
            }
            sleep(pause).await;
            pause = (pause * 2).min(SLOWEST);
        }
        Ok(())
    }

    /// Resumes all processes.
    pub async fn thaw(&self, limit: Duration) -> Result<(), CgroupError> {
        let dir = self.own_freezer_dir()?;
        let begun = Instant::now();
        let mut pause = FASTEST;
        self.order(&dir, FreezerState::Thawed)?;
        while self.freezer_state()? != FreezerState::Thawed {
            if begun.elapsed() >= limit {
                return Err(CgroupError::ThawTimeout { path: dir, limit });
            }
            sleep(pause).await;
            pause = (pause * 2).min(SLOWEST);
        }
        Ok(())
    }

    /// Looks whether all processes stand still. Threads that are still on their way into the freezer are
    /// waited for.
    pub async fn still(&self, limit: Duration) -> Result<Still, CgroupError> {
        let begun = Instant::now();
        let mut pause = FASTEST;
        let mut state = self.freezer_state()?;
        while state == FreezerState::Freezing && begun.elapsed() < limit {
            sleep(pause).await;
            pause = (pause * 2).min(SLOWEST);
            state = self.freezer_state()?;
        }
        let from = std::time::Instant::now();
        let frozen = self.frozen_for()?;
        Ok(Still {
            state,
            frozen,
            from,
            until: std::time::Instant::now(),
        })
    }

    /// For how long the cgroup has been frozen altogether, where the kernel counts that (v2, since 6.18).
    fn frozen_for(&self) -> Result<Option<Duration>, CgroupError> {
        let stat = FlatKeyed::read(&self.freezer_dir()?.join("cgroup.stat.local"))?;
        let micros = stat.and_then(|stat| stat.find("frozen_usec"));
        Ok(micros.map(Duration::from_micros))
    }

    fn freezer_dir(&self) -> Result<PathBuf, CgroupError> {
        self.dir("freezer").ok_or(CgroupError::NoFreezer)
    }

    fn own_freezer_dir(&self) -> Result<PathBuf, CgroupError> {
        self.own_dir(self.freezer_dir()?)
    }

    fn order(&self, dir: &Path, state: FreezerState) -> Result<(), CgroupError> {
        let freeze = state != FreezerState::Thawed;
        let (file, word) = match (self.version, freeze) {
            (Version::V1, true) => ("freezer.state", "FROZEN"),
            (Version::V1, false) => ("freezer.state", "THAWED"),
            (Version::V2, true) => ("cgroup.freeze", "1"),
            (Version::V2, false) => ("cgroup.freeze", "0"),
        };
        read::write(&dir.join(file), word)
    }
}

fn v1_state(dir: &Path) -> Result<FreezerState, CgroupError> {
    let path = dir.join("freezer.state");
    let text = read::text(&path)?.ok_or_else(|| CgroupError::Gone { path: dir.to_owned() })?;
    match text.trim() {
        "THAWED" => Ok(FreezerState::Thawed),
        "FREEZING" => Ok(FreezerState::Freezing),
        "FROZEN" => Ok(FreezerState::Frozen),
        _ => Err(CgroupError::Malformed { path }),
    }
}

fn v2_state(dir: &Path) -> Result<FreezerState, CgroupError> {
    let gone = || CgroupError::Gone { path: dir.to_owned() };
    let events = FlatKeyed::read(&dir.join("cgroup.events"))?.ok_or_else(gone)?;
    let requested = read::number(&dir.join("cgroup.freeze"))?.ok_or_else(gone)?;
    // When the last process of a cgroup has gone while processes of a cgroup below are dying, the kernel
    // reports `frozen 1` even after a thaw, without end (seen with 6.18).
    let is_forgotten = events.get("populated") == 0 && requested == 0;
    let is_frozen = events.get("frozen") == 1 && !is_forgotten;
    Ok(match requested {
        _ if is_frozen && is_frozen_below(dir)? => FreezerState::Frozen,
        0 if !is_frozen => FreezerState::Thawed,
        _ => FreezerState::Freezing,
    })
}

/// Whether all populated cgroups below are frozen: the kernel reports a cgroup as frozen as soon as its own
/// processes are.
fn is_frozen_below(dir: &Path) -> Result<bool, CgroupError> {
    for child in read::children(dir)? {
        // A cgroup without the file has been removed meanwhile.
        if let Some(events) = FlatKeyed::read(&child.join("cgroup.events"))?
            && events.get("populated") == 1
            && !(events.get("frozen") == 1 && is_frozen_below(&child)?)
        {
            return Ok(false);
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn look(state: FreezerState, frozen: Option<u64>, (from, until): (u64, u64)) -> Still {
        // One moment for all.
        static BEGUN: std::sync::OnceLock<std::time::Instant> = std::sync::OnceLock::new();
        let begun = *BEGUN.get_or_init(std::time::Instant::now);
        Still {
            state,
            frozen: frozen.map(Duration::from_micros),
            from: begun + Duration::from_micros(from),
            until: begun + Duration::from_micros(until),
        }
    }

    #[test]
    fn a_thaw_is_found_also_when_it_is_over() {
        use FreezerState::{Freezing, Frozen, Thawed};
        let first = look(Frozen, Some(500), (1_000, 1_010));
        let unlike = |state, frozen, at| look(state, frozen, at).unlike(&first);
        assert!(unlike(Thawed, Some(9_000), (5_000, 5_010)).is_some());
        assert!(unlike(Freezing, Some(9_000), (5_000, 5_010)).is_some());
        assert_eq!(first.unlike(&first), None);
        // From 1010 to 5000 it was frozen for all of 3990 us, or was not.
        assert_eq!(unlike(Frozen, Some(500 + 3_990), (5_000, 5_010)), None);
        assert_eq!(unlike(Frozen, Some(500 + 4_005), (5_000, 5_010)), None);
        assert_eq!(unlike(Frozen, Some(500 + 3_988), (5_000, 5_010)), None, "rounded");
        let thawed = unlike(Frozen, Some(500 + 3_987), (5_000, 5_010)).unwrap();
        assert!(thawed.contains("for 1 us"), "{thawed}");
        let thawed = unlike(Frozen, Some(500), (5_000, 5_010)).unwrap();
        assert!(thawed.contains("for 3988 us"), "{thawed}");
        // Where the kernel does not count, only the state shows it.
        assert_eq!(unlike(Frozen, None, (5_000, 5_010)), None);
        assert_eq!(
            look(Frozen, Some(0), (5_000, 5_010)).unlike(&look(Frozen, None, (0, 0))),
            None
        );
    }
}
