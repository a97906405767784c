//! Transparent huge pages while the driver copies GPU memory into host memory.
//!
//! The driver maps the memory that it fills inside the container's processes and asks for no huge pages, so
//! only the setting of the whole host gives it any. Whoever needs them holds a shared lock of a file in
//! [`names::HUGE_PAGES`] that has the former setting; the last one writes that back and removes the file. Who
//! is killed loses its lock and leaves the file: the next one, the recovery of its transaction, or
//! `firn doctor` puts the setting back.
//!
//! A setting that somebody has changed meanwhile stays. No checkpoint fails for want of huge pages.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::future::Future;
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use firn_config::{HugePages, names};
use firn_host::UnlessAbsent;
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

use firn_process::OrWarn;
use firn_process::blocking::blocking;

/// The host's setting.
const ENABLED: &str = "/sys/kernel/mm/transparent_hugepage/enabled";

/// All new memory gets huge pages.
const ALWAYS: &str = "always";

/// Has the former setting. Each user has a lock of it.
const FORMER: &str = "former";

/// How often somebody else's change of the setting, which takes microseconds, is waited for, and how long.
const TURNS: usize = 100;
const PAUSE: Duration = Duration::from_millis(10);

/// Runs the driver's copy with huge pages, if the configuration asks for them and the host has them.
pub(crate) async fn during<T>(setting: HugePages, copy: impl Future<Output = T>) -> T {
    let user = match setting {
        HugePages::Off => None,
        HugePages::WhileCopying => {
            let begun = blocking(|| Switch::of_host().begin()).await;
            let begun = begun.or_warn(format_args!("{ENABLED} stays as it is while the driver copies"));
            begun.flatten()
        }
    };
    let copied = copy.await;
    if let Some(user) = user {
        let ended = blocking(move || Switch::of_host().end(user)).await;
        ended.or_warn(format_args!("cannot put the former setting back into {ENABLED}"));
    }
    copied
}

/// Puts the setting back if a transaction that was killed has left its own.
pub async fn recover() {
    let recovered = blocking(|| Switch::of_host().recover()).await;
    let recovered = recovered.or_warn(format_args!("cannot put the former setting back into {ENABLED}"));
    if let Some(former) = recovered.flatten() {
        log::warn!("{ENABLED} is {former} again: a shim was killed while it was {ALWAYS}");
    }
}

/// Needs huge pages for as long as it has the lock.
type User = Flock<File>;

/// The host's setting, and the directory that shows who has changed it.
pub struct Switch {
    enabled: PathBuf,
    dir: PathBuf,
}

impl Switch {
    /// That of this host.
    pub fn of_host() -> Self {
        Self {
            enabled: ENABLED.into(),
            dir: names::HUGE_PAGES.into(),
        }
    }

    /// Where the setting is.
    pub fn path(&self) -> &Path {
        &self.enabled
    }

    /// The setting. The kernel lists all that there are and marks the one in force: `always [madvise] never`.
    pub fn setting(&self) -> io::Result<String> {
        let text = fs::read_to_string(&self.enabled)?;
        let marked = text.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
        Ok(marked.map_or(text.trim(), |(setting, _)| setting).to_owned())
    }

    /// Puts the former setting back, and returns it, if a user that was killed has left another.
    pub fn recover(&self) -> io::Result<Option<String>> {
        let Some(_turn) = self.turn().if_present()? else {
            return Ok(None);
        };
        let Some(file) = File::open(self.former()).if_present()? else {
            return Ok(None);
        };
        let lock = lock(file, FlockArg::LockShared)?;
        if is_alone(&lock)? {
            self.put_back()
        } else {
            Ok(None)
        }
    }

    /// Turns huge pages on. None: they are on for all of the host's programs anyway.
    fn begin(&self) -> io::Result<Option<User>> {
        DirBuilder::new().recursive(true).mode(0o700).create(&self.dir)?;
        let _turn = self.turn()?;
        let mut file = OpenOptions::new();
        let file = file.write(true).create(true).truncate(false).mode(0o600);
        let user = lock(file.open(self.former())?, FlockArg::LockShared)?;
        if is_alone(&user)? {
            let is_on = self.turn_on();
            if !matches!(is_on, Ok(true)) {
                fs::remove_file(self.former())?;
                return is_on.map(|_| None);
            }
        }
        // Also of one that was not alone: its lock is lost.
        user.relock(FlockArg::LockShared)?;
        Ok(Some(user))
    }

    /// The caller is alone. False: they were on before firn.
    fn turn_on(&self) -> io::Result<bool> {
        let setting = self.setting()?;
        if setting == ALWAYS {
            // One that was killed may have left it: then the file has the setting from before.
            let is_left = !fs::read_to_string(self.former())?.is_empty();
            if !is_left {
                log::info!("{ENABLED} is {ALWAYS} already");
            }
            return Ok(is_left);
        }
        // Order matters: whoever finds the setting changed finds the former one.
        fs::write(self.former(), &setting)?;
        self.set(ALWAYS)?;
        log::info!("{ENABLED} is {ALWAYS} while the driver copies, and was {setting}");
        Ok(true)
    }

    fn end(&self, user: User) -> io::Result<()> {
        let _turn = self.turn()?;
        if is_alone(&user)?
            && let Some(former) = self.put_back()?
        {
            log::info!("{ENABLED} is {former} again");
        }
        Ok(())
    }

    /// The caller is alone. Returns the setting if it was put back.
    fn put_back(&self) -> io::Result<Option<String>> {
        let former = fs::read_to_string(self.former())?;
        let is_ours = !former.is_empty() && self.setting()? == ALWAYS;
        if is_ours {
            self.set(&former)?;
        }
        fs::remove_file(self.former())?;
        Ok(is_ours.then_some(former))
    }

    fn set(&self, setting: &str) -> io::Result<()> {
        let mut file = OpenOptions::new()
            .write(true)
            .truncate(true)
            .open(&self.enabled)?;
        file.write_all(setting.as_bytes())
    }

    fn former(&self) -> PathBuf {
        self.dir.join(FORMER)
    }

    /// For as long as one has the turn, nobody else begins, ends or recovers.
    fn turn(&self) -> io::Result<Flock<File>> {
        let mut dir = File::open(&self.dir)?;
        for _ in 0..TURNS {
            match Flock::lock(dir, FlockArg::LockExclusiveNonblock) {
                Ok(turn) => return Ok(turn),
                Err((same, Errno::EWOULDBLOCK)) => dir = same,
                Err((_, errno)) => return Err(errno.into()),
            }
            thread::sleep(PAUSE);
        }
        Err(io::ErrorKind::TimedOut.into())
    }
}

fn lock(file: File, how: FlockArg) -> io::Result<Flock<File>> {
    Flock::lock(file, how).map_err(|(_, errno)| errno.into())
}

/// Whether nobody else has a lock of the file. If somebody has, this one is lost.
fn is_alone(lock: &Flock<File>) -> io::Result<bool> {
    match lock.relock(FlockArg::LockExclusiveNonblock) {
        Ok(()) => Ok(true),
        Err(Errno::EWOULDBLOCK) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A host whose setting is this, as the kernel shows it.
    struct Host(tempfile::TempDir);

    impl Host {
        fn with(setting: &str) -> Self {
            let host = Self(tempfile::tempdir().unwrap());
            host.set(setting);
            host
        }

        fn switch(&self) -> Switch {
            Switch {
                enabled: self.0.path().join("enabled"),
                dir: self.0.path().join("run/huge-pages"),
            }
        }

        fn set(&self, setting: &str) {
            fs::write(self.switch().enabled, setting).unwrap();
        }

        /// Nobody uses it, or is thought to.
        fn is(&self, setting: &str) -> bool {
            let switch = self.switch();
            switch.setting().unwrap() == setting && !switch.former().exists()
        }

        fn begin(&self) -> User {
            let user = self.switch().begin().unwrap().expect("turned on");
            assert_eq!(self.switch().setting().unwrap(), ALWAYS);
            user
        }
    }

    const MADVISE: &str = "always [madvise] never\n";

    #[test]
    fn the_last_user_puts_the_former_setting_back() {
        let host = Host::with(MADVISE);
        let (first, second) = (host.begin(), host.begin());
        host.switch().end(first).unwrap();
        assert_eq!(host.switch().setting().unwrap(), ALWAYS);
        host.switch().end(second).unwrap();
        assert!(host.is("madvise"));
    }

    #[test]
    fn users_that_come_and_go_at_once_leave_the_former_setting() {
        let host = Host::with(MADVISE);
        let come_and_go = || {
            for _ in 0..50 {
                let user = host.begin();
                host.switch().recover().unwrap();
                assert_eq!(host.switch().setting().unwrap(), ALWAYS);
                host.switch().end(user).unwrap();
            }
        };
        thread::scope(|scope| (0..4).for_each(|_| drop(scope.spawn(come_and_go))));
        assert!(host.is("madvise"));
    }

    /// A lock ends with its process.
    #[test]
    fn what_a_killed_user_has_left_is_put_back() {
        let host = Host::with(MADVISE);
        drop(host.begin());
        assert_eq!(host.switch().recover().unwrap().as_deref(), Some("madvise"));
        assert!(host.is("madvise"));
        assert_eq!(host.switch().recover().unwrap(), None);

        drop(host.begin());
        let next = host.begin();
        host.switch().end(next).unwrap();
        assert!(host.is("madvise"), "the next one took it for the host's own");

        let (killed, other) = (host.begin(), host.begin());
        drop(killed);
        assert_eq!(host.switch().recover().unwrap(), None);
        assert_eq!(host.switch().setting().unwrap(), ALWAYS, "another one needs it");
        host.switch().end(other).unwrap();
        assert!(host.is("madvise"));
    }

    #[test]
    fn a_setting_that_somebody_has_changed_meanwhile_stays() {
        let host = Host::with(MADVISE);
        let user = host.begin();
        host.set("always madvise [never]\n");
        host.switch().end(user).unwrap();
        assert!(host.is("never"));

        drop(host.begin());
        host.set(MADVISE);
        assert_eq!(host.switch().recover().unwrap(), None);
        assert!(host.is("madvise"));

        drop(host.begin());
        host.set("always madvise [never]\n");
        let user = host.begin();
        host.switch().end(user).unwrap();
        assert!(
            host.is("never"),
            "what was there before the killed one is out of date"
        );
    }

    #[test]
    fn where_they_are_always_on_nothing_is_done() {
        let host = Host::with("[always] madvise never\n");
        assert!(host.switch().begin().unwrap().is_none());
        assert!(host.is(ALWAYS));
        assert_eq!(host.switch().recover().unwrap(), None);
        assert!(host.is(ALWAYS));
    }

    #[test]
    fn a_host_that_cannot_be_changed_stays_as_it_is() {
        let host = Host::with(MADVISE);
        for enabled in ["/nonexistent/enabled", "/proc/sys/kernel/ostype"] {
            let switch = Switch {
                enabled: enabled.into(),
                ..host.switch()
            };
            assert!(switch.begin().is_err(), "{enabled}");
            assert!(!switch.former().exists(), "{enabled}");
        }
        assert_eq!(host.switch().recover().unwrap(), None);
        // A directory that cannot be made.
        let nowhere = Switch {
            dir: "/proc/huge-pages".into(),
            ..host.switch()
        };
        assert!(nowhere.begin().is_err());
        assert_eq!(nowhere.recover().unwrap(), None);
        assert!(host.is("madvise"));
    }

    #[test]
    fn one_that_keeps_its_turn_is_not_waited_for() {
        let host = Host::with(MADVISE);
        let user = host.begin();
        let turn = host.switch().turn().unwrap();
        let late = host.switch().end(user).unwrap_err();
        assert_eq!(late.kind(), io::ErrorKind::TimedOut);
        drop(turn);
        assert_eq!(host.switch().recover().unwrap().as_deref(), Some("madvise"));
    }
}
