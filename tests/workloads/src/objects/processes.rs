//! A process: its child, its root, its directory and its timer.

use std::env;
use std::fs;
use std::io;
use std::path::Path;
use std::process::Command;
use std::thread;

use nix::sys::signal::{SigEvent, SigSet, SigevNotify, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::timer::{Expiration, Timer, TimerSetTimeFlags};
use nix::time::ClockId;
use nix::unistd;

use firn_workloads::habits;

use super::{INTERVAL, Look, PACE, kernel};

/// It sends a signal between any two looks.
pub(super) fn timer() -> io::Result<Look> {
    let signals = SigSet::from(Signal::SIGALRM);
    signals.thread_block()?;
    let file = SignalFd::with_flags(&signals, SfdFlags::SFD_NONBLOCK)?;
    let notify = SigevNotify::SigevSignal {
        signal: Signal::SIGALRM,
        si_value: 0,
    };
    let mut timer = Timer::new(ClockId::CLOCK_MONOTONIC, SigEvent::new(notify))?;
    timer.set(Expiration::Interval(INTERVAL.into()), TimerSetTimeFlags::empty())?;
    thread::sleep(PACE);
    Ok(Box::new(move || {
        let _runs = &timer;
        Ok(file.read_signal()?.is_some())
    }))
}

/// As [`timer`], by setitimer(2).
pub(super) fn interval_timer() -> io::Result<Look> {
    let signals = SigSet::from(Signal::SIGALRM);
    signals.thread_block()?;
    let file = SignalFd::with_flags(&signals, SfdFlags::SFD_NONBLOCK)?;
    kernel::set_interval_timer(INTERVAL.subsec_micros().into())?;
    thread::sleep(PACE);
    Ok(Box::new(move || Ok(file.read_signal()?.is_some())))
}

pub(super) fn zombie() -> io::Result<Look> {
    let child = Command::new("true").spawn()?;
    let stat = format!("/proc/{}/stat", child.id());
    let is_dead = move || Ok::<_, io::Error>(fs::read_to_string(&stat)?.contains(") Z "));
    while !is_dead()? {
        thread::sleep(PACE);
    }
    Ok(Box::new(move || {
        let _not_waited_for = &child;
        is_dead()
    }))
}

pub(super) fn chroot(path: &Path) -> io::Result<Look> {
    fs::create_dir(path)?;
    fs::write(path.join("inside"), "")?;
    unistd::chroot(path)?;
    env::set_current_dir("/")?;
    Ok(Box::new(|| {
        let is_there = |path| Path::new(path).exists();
        Ok(is_there("/inside") && !is_there("/bin"))
    }))
}

pub(super) fn no_directory(path: &Path) -> io::Result<Look> {
    fs::create_dir(path)?;
    env::set_current_dir(path)?;
    fs::remove_dir(path)?;
    let cwd = || fs::read_link("/proc/self/cwd");
    let shown = cwd()?;
    Ok(Box::new(move || {
        let is_gone = shown.to_string_lossy().ends_with(" (deleted)");
        Ok(is_gone && cwd()? == shown)
    }))
}

/// The kernel shows the key of each mapping.
pub(super) fn protection_key() -> io::Result<Look> {
    habits::protection_key()?;
    let has_key = |line: &str| {
        let key = line.strip_prefix("ProtectionKey:");
        key.is_some_and(|key| key.trim() != "0")
    };
    Ok(Box::new(move || {
        let smaps = fs::read_to_string("/proc/self/smaps")?;
        Ok(smaps.lines().any(has_key))
    }))
}
