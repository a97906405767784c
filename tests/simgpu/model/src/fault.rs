//! Scripted faults: `faults.json` in the state directory of the node, read by the caller's library at each
//! call.
//!
//! ```json
//! {"rules": [
//!   {"call": "lock", "pid": 4711, "comm": "gpu-counter", "nth": 2, "times": 1, "when": "before",
//!    "action": {"error": "CUDA_ERROR_UNKNOWN"}}
//! ]}
//! ```
//! `call` is one of init, state, tid, lock, checkpoint, restore, unlock. `pid` (as the caller names the
//! process) and `comm` (of the process called about; of the caller itself for init) are optional filters. The
//! rule acts from its `nth` matching call on (default 1), `times` times (default for ever). `when` is
//! `before` (default: the call is not carried out when the action is an error) or `after` (it is carried out,
//! then the action follows). Actions: `{"error": NAME}`, `{"delay_ms": N}`, `{"transfer_ms": N}` (checkpoint
//! and restore: the copy takes that long), `"hang"`, `"crash"` (abort the caller). `seen` counts matching
//! calls over all callers and is kept by the library. A rule that `follows` another (`{"rule": 0}`, its place
//! in the list) or a file (`{"file": PATH}`) matches nothing before that rule has acted or that file is
//! there. The first rule that acts wins.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// A driver call that a rule can match.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Call {
    /// cuInit
    Init,
    /// cuCheckpointProcessGetState
    State,
    /// cuCheckpointProcessGetRestoreThreadId
    Tid,
    /// cuCheckpointProcessLock
    Lock,
    /// cuCheckpointProcessCheckpoint
    Checkpoint,
    /// cuCheckpointProcessRestore
    Restore,
    /// cuCheckpointProcessUnlock
    Unlock,
}

/// Before or after the call is carried out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum When {
    /// Before; an error replaces the call.
    #[default]
    Before,
    /// After; an error replaces the answer only.
    After,
}

/// What a rule does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Action {
    /// Answer this CUresult, by name.
    Error(String),
    /// Wait.
    DelayMs(u64),
    /// Have the process copy its memory for so long, whatever becomes of the caller.
    TransferMs(u32),
    /// Never return.
    Hang,
    /// Abort the calling process.
    Crash,
}

/// What must have happened before a rule matches anything.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Follows {
    /// The rule at this place has acted.
    Rule(usize),
    /// This file has been made.
    File(PathBuf),
}

/// One scripted fault.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    /// The call that it acts on.
    pub call: Call,
    /// Only this process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<i32>,
    /// Only processes with this name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub comm: Option<String>,
    /// Only from then on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub follows: Option<Follows>,
    /// First matching call that it acts on, from 1.
    #[serde(default = "first")]
    pub nth: u64,
    /// How often it acts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub times: Option<u64>,
    /// Before or after the call.
    #[serde(default)]
    pub when: When,
    /// What it does.
    pub action: Action,
    /// Matching calls so far.
    #[serde(default)]
    pub seen: u64,
}

fn first() -> u64 {
    1
}

/// The fault script.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Script {
    /// Tried in order.
    pub rules: Vec<Rule>,
}

/// A fault script that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FaultError {
    /// It cannot be read or written.
    #[error("cannot access the fault script {path}")]
    Io {
        /// The script.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It does not follow the format.
    #[error("the fault script {path} cannot be understood")]
    Format {
        /// The script.
        path: PathBuf,
        /// Why.
        source: serde_json::Error,
    },
}

impl Rule {
    fn matches(&self, call: Call, pid: i32, comm: &str) -> bool {
        self.call == call
            && self.pid.is_none_or(|wanted| wanted == pid)
            && self.comm.as_deref().is_none_or(|wanted| wanted == comm)
    }

    /// Counts a matching call; whether the rule acts on it.
    fn hit(&mut self) -> bool {
        self.seen += 1;
        let past = self.seen.checked_sub(self.nth);
        past.is_some_and(|past| self.times.is_none_or(|times| past < times))
    }
}

impl Script {
    /// Counts a call; the rule that acts on it.
    fn hit(&mut self, call: Call, pid: i32, comm: &str) -> Option<Rule> {
        let acted: Vec<bool> = self.rules.iter().map(|rule| rule.seen >= rule.nth).collect();
        let begun = |rule: &Rule| match &rule.follows {
            None => true,
            Some(Follows::Rule(place)) => acted.get(*place).is_some_and(|acted| *acted),
            Some(Follows::File(path)) => path.exists(),
        };
        let mut acting = None;
        for rule in &mut self.rules {
            if rule.matches(call, pid, comm) && begun(rule) && rule.hit() && acting.is_none() {
                acting = Some(rule.clone());
            }
        }
        acting
    }
}

/// The rule that acts on this call about process `pid`, if the script in `state` has one; counts the call.
pub fn consult(state: &Path, call: Call, pid: i32) -> Result<Option<Rule>, FaultError> {
    if !state.join("faults.json").exists() {
        return Ok(None);
    }
    let comm = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    edit(state, |script| script.hit(call, pid, comm.trim_end()))
}

/// Changes the script in `state` under its lock.
pub fn edit<T>(state: &Path, change: impl FnOnce(&mut Script) -> T) -> Result<T, FaultError> {
    let path = state.join("faults.json");
    let io = |source| FaultError::Io {
        path: path.clone(),
        source,
    };
    fs::create_dir_all(state).map_err(io)?;
    let lock = File::options()
        .create(true)
        .append(true)
        .open(state.join("faults.lock"))
        .map_err(io)?;
    lock.lock().map_err(io)?;
    let mut script = match fs::read(&path) {
        Ok(bytes) => serde_json::from_slice(&bytes).map_err(|source| FaultError::Format {
            path: path.clone(),
            source,
        })?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => Script::default(),
        Err(error) => return Err(io(error)),
    };
    let result = change(&mut script);
    if script.rules.is_empty() {
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(io(error)),
            _ => return Ok(result),
        }
    }
    let bytes = serde_json::to_vec_pretty(&script).map_err(|source| FaultError::Format {
        path: path.clone(),
        source,
    })?;
    let fresh = state.join("faults.json.new");
    fs::write(&fresh, bytes).map_err(io)?;
    fs::rename(fresh, &path).map_err(io)?;
    Ok(result)
}

#[cfg(test)]
mod tests {
    use super::{Action, Call, Rule, Script, When, consult, edit};

    fn rule(text: &str) -> Rule {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn acts_from_the_nth_matching_call_as_often_as_set() {
        let mut rule = rule(r#"{"call":"lock","nth":2,"times":2,"action":"hang"}"#);
        let acted: Vec<bool> = (0..5).map(|_| rule.hit()).collect();
        assert_eq!(acted, [false, true, true, false, false]);
    }

    #[test]
    fn a_rule_that_follows_another_counts_from_then_on() {
        let text = r#"{"rules":[{"call":"lock","nth":2,"times":1,"action":"crash"},
            {"call":"state","times":1,"follows":{"rule":0},"action":"hang"}]}"#;
        let mut script: Script = serde_json::from_str(text).unwrap();
        let mut act = |call| script.hit(call, 7, "a").map(|rule| rule.action);
        let calls = [
            Call::State,
            Call::Lock,
            Call::State,
            Call::Lock,
            Call::State,
            Call::State,
        ];
        let acted = calls.map(&mut act);
        let (crash, hang) = (Some(Action::Crash), Some(Action::Hang));
        assert_eq!(acted, [None, None, None, crash, hang, None]);
    }

    #[test]
    fn filters_by_call_pid_and_name() {
        let rule = rule(r#"{"call":"restore","pid":7,"comm":"a","action":{"delay_ms":5}}"#);
        assert!(rule.matches(Call::Restore, 7, "a"));
        assert!(!rule.matches(Call::Restore, 8, "a"));
        assert!(!rule.matches(Call::Restore, 7, "b"));
        assert!(!rule.matches(Call::Lock, 7, "a"));
    }

    #[test]
    fn counts_survive_between_callers() {
        let state = std::env::temp_dir().join(format!("simgpu-fault-{}", std::process::id()));
        let text = r#"{"rules":[{"call":"unlock","times":1,"when":"after",
            "action":{"error":"CUDA_ERROR_UNKNOWN"}}]}"#;
        let script: Script = serde_json::from_str(text).unwrap();
        edit(&state, |current| *current = script).unwrap();
        let acting = consult(&state, Call::Unlock, 1).unwrap().unwrap();
        assert_eq!(
            (acting.when, acting.action),
            (When::After, Action::Error("CUDA_ERROR_UNKNOWN".into()))
        );
        assert_eq!(consult(&state, Call::Unlock, 1).unwrap(), None);
        std::fs::remove_dir_all(state).unwrap();
    }
}
