//! How much of the suites a run shows.

use std::env;

use firn_node::{Platform, Suite};

/// Environment variable: `commit` leaves out what is for a run of all.
pub const TIER: &str = "FIRN_TIER";

/// How much is run. tests/README.md lists what is in which tier, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    /// What every commit has to pass.
    Commit,
    /// Everything, before an issue is resolved or a release is made.
    All,
}

impl Tier {
    /// That of this run, by [`TIER`]: all, unless it is `commit`.
    pub fn current() -> Self {
        let is_commit = env::var_os(TIER).is_some_and(|tier| tier == Self::Commit.as_str());
        if is_commit { Self::Commit } else { Self::All }
    }

    /// As [`TIER`] has it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Commit => "commit",
            Self::All => "all",
        }
    }

    /// The platforms on which a case that has these runs.
    pub fn platforms(self, platforms: &'static [Platform]) -> impl Iterator<Item = Platform> {
        let included = move |platform: &Platform| self.includes(*platform, platforms);
        platforms.iter().copied().filter(included)
    }

    /// Whether a case that has these platforms runs on this one. Of twins, which differ by the version of
    /// containerd, a commit runs the newer one.
    fn includes(self, platform: Platform, platforms: &[Platform]) -> bool {
        let has_newer = || platforms.iter().any(|other| other.suite == Suite::Forky);
        self == Self::All || platform.suite != Suite::Trixie || !has_newer()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_twins_a_commit_has_the_newer_one() {
        let both = [Platform::FORKY, Platform::TRIXIE, Platform::FORKY_V2];
        let included = |tier: Tier, platforms: &[Platform]| -> Vec<bool> {
            let included = platforms
                .iter()
                .map(|platform| tier.includes(*platform, platforms));
            included.collect()
        };
        assert_eq!(included(Tier::Commit, &both), [true, false, true]);
        assert_eq!(included(Tier::All, &both), [true; 3]);
        assert_eq!(
            included(Tier::Commit, &[Platform::TRIXIE, Platform::NOBLE_V2]),
            [true; 2]
        );
    }
}
