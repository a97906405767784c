//! Tasks and their threads: credentials, capabilities, seccomp, labels, limits.

use super::seccomp::{DeniedCalls, Filters, Seccomp};
use super::wire::{Message, WireError};
use super::{Host, Image, ImageFault, missing};
use firn_oci::Spec;
use firn_oci::spec::capability;

/// The list of the processes.
pub(super) const PSTREE: &str = "pstree.img";
pub(super) const PSTREE_MAGIC: u32 = 0x5027_3030;
pub(super) const CORE_MAGIC: u32 = 0x5505_3847;

/// States of a task as CRIU numbers them.
const ALIVE: u32 = 1;
pub(super) const DEAD: u32 = 2;
pub(super) const STOPPED: u32 = 3;
pub(super) const ZOMBIE: u32 = 6;

/// Scheduling policies that take the CPU from others.
const REALTIME: [u32; 3] = [1, 2, 6];

/// A task of the image.
pub(super) struct Task {
    pub pid: u32,
    /// Whether it runs after the restore; a zombie does not.
    pub is_alive: bool,
    /// Id of the cgroups of its first thread.
    pub cgroups: Option<u32>,
}

/// What of a core is looked at.
pub(super) struct Core {
    pub state: Option<u32>,
    pub rlimits: Option<Vec<[u64; 2]>>,
    pub oom_score_adj: Option<i32>,
    pub thread: Option<Thread>,
}

pub(super) struct Thread {
    pub policy: u32,
    pub cgroups: Option<u32>,
    pub seccomp: Seccomp,
    pub creds: Creds,
}

pub(super) struct Creds {
    /// Real, effective, saved, and that for files.
    pub users: [u32; 4],
    /// The same, and the supplementary groups.
    pub groups: Vec<u32>,
    pub capabilities: [(&'static str, u64); 5],
    pub label: String,
    pub no_new_privs: bool,
}

/// All tasks, init first, none of which exceeds the spec.
pub(super) fn check(spec: &Spec, image: &Image, host: &Host) -> Result<Vec<Task>, ImageFault> {
    let tree = image.read(PSTREE, PSTREE_MAGIC, |message| {
        Ok((message.required(1)?, message.numbers(5)?))
    })?;
    let tree = tree
        .filter(|tree| !tree.is_empty())
        .ok_or_else(|| missing(PSTREE))?;
    let filters = Filters::read(image)?;
    let allowed = Allowed::by(spec, host)?;
    let mut tasks = Vec::with_capacity(tree.len());
    for (pid, threads) in tree {
        let name = format!("core-{pid}.img");
        let core = image.required(&name, CORE_MAGIC, Core::read)?;
        let is_alive = match core.state {
            Some(ALIVE | STOPPED) => true,
            Some(DEAD | ZOMBIE) => false,
            _ => return Err(ImageFault::malformed(&name, "no state that a dumped task has")),
        };
        let first = core.thread.as_ref();
        if is_alive {
            allowed.task(&name, pid, &core)?;
            allowed.thread(&name, pid, first, &filters, false)?;
            let are_for_all = first.is_some_and(|first| filters.are_for_all(first.seccomp));
            for thread in threads.into_iter().filter(|thread| *thread != pid) {
                let name = format!("core-{thread}.img");
                let core = image.required(&name, CORE_MAGIC, Core::read)?;
                allowed.thread(&name, thread, core.thread.as_ref(), &filters, are_for_all)?;
            }
        }
        tasks.push(Task {
            pid,
            is_alive,
            cgroups: first.and_then(|first| first.cgroups),
        });
    }
    Ok(tasks)
}

impl Core {
    pub(super) fn read(message: &Message<'_>) -> Result<Self, WireError> {
        let task = message.message(3)?;
        let thread = message.message(5)?;
        let mut core = Self {
            state: None,
            rlimits: None,
            oom_score_adj: None,
            thread: thread.as_ref().map(Thread::read).transpose()?.flatten(),
        };
        if let Some(task) = task {
            // Where older images have the seccomp mode: it would count instead of the thread's.
            if let Some(field) = [11, 12].into_iter().find(|field| task.has(*field)) {
                return Err(WireError { field });
            }
            core.state = task.number(1)?;
            core.oom_score_adj = task.signed(14)?;
            let limit = |limit: &Message<'_>| Ok([limit.required_long(1)?, limit.required_long(2)?]);
            let limits = task.message(8)?.map(|limits| limits.each(1, limit));
            core.rlimits = limits.transpose()?;
        }
        Ok(core)
    }
}

impl Thread {
    /// None without credentials, which CRIU would look for elsewhere.
    fn read(message: &Message<'_>) -> Result<Option<Self>, WireError> {
        let Some(creds) = message.message(10)? else {
            return Ok(None);
        };
        Ok(Some(Self {
            policy: message.number(5)?.unwrap_or(0),
            cgroups: message.number(16)?,
            seccomp: Seccomp {
                mode: message.number(11)?.unwrap_or(0),
                filter: message.number(12)?,
            },
            creds: Creds::read(&creds)?,
        }))
    }
}

impl Creds {
    fn read(message: &Message<'_>) -> Result<Self, WireError> {
        let set = |field| -> Result<u64, WireError> {
            match message.numbers(field)?[..] {
                [] => Ok(0),
                [low] => Ok(u64::from(low)),
                [low, high] => Ok(u64::from(high) << 32 | u64::from(low)),
                _ => Err(WireError { field }),
            }
        };
        let mut groups = message.numbers(14)?;
        for field in [2, 4, 6, 8] {
            groups.push(message.required(field)?);
        }
        Ok(Self {
            users: [
                message.required(1)?,
                message.required(3)?,
                message.required(5)?,
                message.required(7)?,
            ],
            groups,
            capabilities: [
                ("inheritable", set(9)?),
                ("permitted", set(10)?),
                ("effective", set(11)?),
                ("bounding", set(12)?),
                ("ambient", set(19)?),
            ],
            label: message.text(15)?.unwrap_or_default().to_owned(),
            no_new_privs: message.number(18)?.unwrap_or(0) != 0,
        })
    }
}

/// What the spec allows a task.
pub(super) struct Allowed<'a> {
    spec: &'a Spec,
    bounding: u64,
    permitted: u64,
    /// Number of the limit and its hard value, with its name.
    rlimits: Vec<(usize, u64, String)>,
    oom_score_adj: i32,
    denied_calls: DeniedCalls,
    /// Whose processes can be nobody else.
    users: Option<u32>,
    groups: Option<Vec<u32>>,
    user_map: Option<[Vec<[u32; 3]>; 2]>,
}

/// What an image asks for too much: its name, the value found, and the values that the spec allows.
type Excess = (String, String, String);

fn excess(what: impl ToString, found: impl ToString, allowed: impl ToString) -> Option<Excess> {
    Some((what.to_string(), found.to_string(), allowed.to_string()))
}

impl<'a> Allowed<'a> {
    pub(super) fn by(spec: &'a Spec, host: &Host) -> Result<Self, ImageFault> {
        let (bounding, permitted) = (spec.capabilities("bounding"), spec.capabilities("permitted"));
        let has = |name| bounding & capability(name) != 0;
        let no_new_privs = spec.no_new_privs();
        // Without these and without programs that change it, a process stays whom the spec makes it.
        let stays = |name| no_new_privs && permitted & capability(name) == 0;
        let (user, groups) = spec.user();
        let maps = || -> Result<_, ImageFault> { Ok([spec.id_map("uid")?, spec.id_map("gid")?]) };
        let (rlimits, oom_score_adj) = if has("CAP_SYS_RESOURCE") {
            (Vec::new(), i32::MIN)
        } else {
            (
                spec.rlimits(),
                spec.oom_score_adj().unwrap_or(host.oom_score_adj.min(0)),
            )
        };
        Ok(Self {
            spec,
            bounding,
            permitted: if no_new_privs {
                permitted & bounding
            } else {
                bounding
            },
            rlimits,
            oom_score_adj,
            denied_calls: DeniedCalls::of(spec),
            users: user.filter(|_| stays("CAP_SETUID")),
            groups: Some(groups).filter(|_| stays("CAP_SETGID")),
            user_map: spec.makes_user_namespace().then(maps).transpose()?,
        })
    }

    pub(super) fn task(&self, file: &str, pid: u32, core: &Core) -> Result<(), ImageFault> {
        let of = |what: &str| format!("{what} of process {pid}");
        for (number, hard, name) in &self.rlimits {
            let found = core.rlimits.as_ref().and_then(|all| all.get(*number));
            let found = found.copied().unwrap_or([u64::MAX; 2]);
            if found.iter().any(|limit| limit > hard) {
                let [soft, found] = found;
                let found = format!("{soft}, at most {found}");
                return Err(ImageFault::exceeds(file, of(name), found, hard));
            }
        }
        let score = core.oom_score_adj.unwrap_or(0);
        if score < self.oom_score_adj {
            let (what, allowed) = (of("oom_score_adj"), self.oom_score_adj);
            return Err(ImageFault::exceeds(file, what, score, allowed));
        }
        Ok(())
    }

    /// A thread does not exceed the spec. Its filters may be those of its process's first thread.
    pub(super) fn thread(
        &self,
        file: &str,
        id: u32,
        thread: Option<&Thread>,
        filters: &Filters,
        has_firsts: bool,
    ) -> Result<(), ImageFault> {
        let thread = thread.ok_or_else(|| ImageFault::malformed(file, "a thread without credentials"))?;
        let excess = (self.more_privileges(thread))
            .or_else(|| self.other_filter(thread, filters, has_firsts))
            .or_else(|| self.other_ids(&thread.creds));
        let Some((what, found, allowed)) = excess else {
            return Ok(());
        };
        let what = format_args!("{what} of thread {id}");
        Err(ImageFault::exceeds(file, what, found, allowed))
    }

    /// More capabilities or a weaker restriction than the spec gives.
    fn more_privileges(&self, thread: &Thread) -> Option<Excess> {
        let creds = &thread.creds;
        for (set, found) in creds.capabilities {
            let allowed = match set {
                "bounding" | "inheritable" => self.bounding,
                _ => self.permitted,
            };
            if found & !allowed != 0 {
                let what = format!("the {set} capabilities");
                return excess(what, format_args!("{found:016x}"), format_args!("{allowed:016x}"));
            }
        }
        if self.spec.no_new_privs() && !creds.no_new_privs {
            return excess("no_new_privs", "unset", "set");
        }
        if let Some(label) = self.spec.label().filter(|label| *label != creds.label) {
            let found = Some(&*creds.label).filter(|label| !label.is_empty());
            let found = found.unwrap_or("none");
            return excess("the security label", found, label);
        }
        if REALTIME.contains(&thread.policy) && self.bounding & capability("CAP_SYS_NICE") == 0 {
            let allowed = "none that needs CAP_SYS_NICE";
            return excess("the scheduling policy", thread.policy, allowed);
        }
        None
    }

    /// No seccomp filter although the spec has one, or one that lets through what the spec's denies.
    fn other_filter(&self, thread: &Thread, filters: &Filters, has_firsts: bool) -> Option<Excess> {
        let Seccomp { mode, filter } = thread.seccomp;
        if !self.spec.has_seccomp() || (has_firsts && mode == 0) {
            return None;
        }
        match filters.permitted(thread.seccomp, &self.denied_calls) {
            Some(None) => None,
            Some(Some(call)) => {
                let found = format_args!("a filter that permits {call}");
                excess("seccomp", found, "a profile that denies it")
            }
            None => {
                let found = format_args!("mode {mode}, filter {filter:?}");
                excess("seccomp", found, "a filter")
            }
        }
    }

    /// A user or group that the spec does not give.
    fn other_ids(&self, creds: &Creds) -> Option<Excess> {
        if let Some(allowed) = self.users
            && let Some(user) = creds.users.iter().find(|user| **user != allowed)
        {
            return excess("a user id", user, allowed);
        }
        if let Some(allowed) = &self.groups
            && let Some(group) = creds.groups.iter().find(|group| !allowed.contains(group))
        {
            return excess("a group id", group, format_args!("{allowed:?}"));
        }
        let [users, groups] = self.user_map.as_ref()?;
        let pairs = [
            ("a user id", &creds.users[..], users),
            ("a group id", &creds.groups[..], groups),
        ];
        pairs.into_iter().find_map(|(what, ids, map)| {
            let mapped = |id: u32| {
                map.iter()
                    .any(|[first, _, count]| id.checked_sub(*first).is_some_and(|at| at < *count))
            };
            let other = ids.iter().find(|id| !mapped(**id))?;
            excess(what, other, "one of the user namespace")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_of_capabilities_has_two_words_at_most() {
        let ids: Vec<u8> = (1..=8).flat_map(|field| [field << 3, 0]).collect();
        let read = |set: &[u8]| {
            let creds = Creds::read(&Message::parse(&[&ids, set].concat()).unwrap());
            creds.map(|creds| creds.capabilities[0])
        };
        assert_eq!(read(&[]), Ok(("inheritable", 0)), "older images lack some");
        assert_eq!(read(&[72, 5]), Ok(("inheritable", 5)));
        assert_eq!(read(&[72, 5, 72, 3]), Ok(("inheritable", 3 << 32 | 5)));
        assert_eq!(read(&[72, 5, 72, 3, 72, 1]), Err(WireError { field: 9 }));
    }
}
