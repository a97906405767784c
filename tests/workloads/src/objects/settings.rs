//! Settings of a process: each is set once, and read again as the kernel shows it.

use std::fs;
use std::io;
use std::process;

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::sys::prctl;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::Signal;
use nix::sys::stat::{Mode, umask};
use nix::unistd::Pid;

use super::kernel;
use super::{Kind, Look};

/// Sets it, and compares it with what it was from then on.
pub(super) fn kept(kind: Kind) -> io::Result<Look> {
    let before = shown(kind)?;
    set(kind)?;
    let made = shown(kind)?;
    // Its container may have it from the start.
    if made == before && kind != Kind::NoNewPrivileges {
        return Err(io::Error::other(format!("it is as it was: {made}")));
    }
    Ok(Box::new(move || Ok(shown(kind)? == made)))
}

fn set(kind: Kind) -> io::Result<()> {
    match kind {
        Kind::Nice => kernel::set_nice(7)?,
        Kind::Policy => kernel::set_batch_policy()?,
        Kind::OomScore => fs::write("/proc/self/oom_score_adj", "555")?,
        Kind::NoHugePages => prctl::set_thp_disable(true)?,
        Kind::Name => prctl::set_name(c"renamed")?,
        Kind::ParentsEnd => prctl::set_pdeathsig(Signal::SIGUSR2)?,
        Kind::Subreaper => prctl::set_child_subreaper(true)?,
        Kind::NoNewPrivileges => prctl::set_no_new_privs()?,
        Kind::Umask => {
            umask(Mode::from_bits_truncate(0o035));
        }
        // CRIU's code sends descriptors from this process, and the kernel counts what all processes of its
        // user have on their way, also those of other dumps: beyond the limit it sends none.
        Kind::Limit => setrlimit(Resource::RLIMIT_NOFILE, 1000, 1001)?,
        Kind::Ignored => kernel::ignore(Signal::SIGUSR2)?,
        Kind::SeccompFilter => kernel::seccomp_filter()?,
        Kind::NotDumpable => prctl::set_dumpable(false)?,
        Kind::Affinity => {
            let all = sched_getaffinity(Pid::from_raw(0))?;
            let last = (0..CpuSet::count()).rfind(|cpu| all.is_set(*cpu) == Ok(true));
            let mut one = CpuSet::new();
            one.set(last.unwrap_or(0))?;
            sched_setaffinity(Pid::from_raw(0), &one)?;
        }
        Kind::IoPriority => kernel::set_io_priority(IO_PRIORITY)?,
        Kind::TimerSlack => prctl::set_timerslack(77_000)?,
        Kind::Personality => kernel::set_personality(NO_RANDOM_ADDRESSES)?,
        Kind::MemoryPolicy => kernel::set_preferred_node()?,
        _ => return Err(io::Error::other("no setting")),
    }
    Ok(())
}

/// Best effort, lowest.
const IO_PRIORITY: i32 = 2 << 13 | 7;

const NO_RANDOM_ADDRESSES: u32 = 0x0004_0000;

fn shown(kind: Kind) -> io::Result<String> {
    Ok(match kind {
        // After the name: state, then the fields from the fourth on.
        Kind::Nice => field(19)?,
        Kind::Policy => field(41)?,
        Kind::OomScore => fs::read_to_string("/proc/self/oom_score_adj")?,
        Kind::NoHugePages => line("THP_enabled")?,
        Kind::Name => line("Name")?,
        Kind::ParentsEnd => format!("{:?}", prctl::get_pdeathsig()?),
        Kind::Subreaper => prctl::get_child_subreaper()?.to_string(),
        Kind::NoNewPrivileges => line("NoNewPrivs")?,
        Kind::Umask => line("Umask")?,
        Kind::Limit => format!("{:?}", getrlimit(Resource::RLIMIT_NOFILE)?),
        Kind::Ignored => line("SigIgn")?,
        Kind::SeccompFilter => line("Seccomp")?,
        Kind::NotDumpable => prctl::get_dumpable()?.to_string(),
        Kind::Affinity => {
            let set = sched_getaffinity(Pid::from_raw(0))?;
            let own = (0..CpuSet::count()).filter(|cpu| set.is_set(*cpu) == Ok(true));
            format!("{:?}", own.collect::<Vec<_>>())
        }
        Kind::IoPriority => kernel::io_priority()?.to_string(),
        Kind::TimerSlack => prctl::get_timerslack()?.to_string(),
        Kind::Personality => fs::read_to_string("/proc/self/personality")?,
        Kind::MemoryPolicy => kernel::memory_policy()?.to_string(),
        _ => return Err(io::Error::other("no setting")),
    })
}

/// A line of the status of this process.
fn line(name: &str) -> io::Result<String> {
    let status = fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find(|line| line.starts_with(&format!("{name}:")));
    line.map(str::to_owned)
        .ok_or_else(|| io::Error::other(format!("no {name}")))
}

/// A field of /proc/PID/stat, counted from one.
fn field(number: usize) -> io::Result<String> {
    let stat = fs::read_to_string(format!("/proc/{}/stat", process::id()))?;
    let after = stat.rsplit_once(") ").map_or("", |(_, after)| after);
    let field = after.split(' ').nth(number - 3);
    field
        .map(str::to_owned)
        .ok_or_else(|| io::Error::other("no such field"))
}
