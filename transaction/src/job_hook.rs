//! Calls the hooks of the job, by firn-hook, in a process of its own.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use firn_config::{Config, JobHooks, find_program, names};
use firn_gpu::GpuUuid;
use firn_host::{Chain, Problem, procfs};
use firn_oci::Spec;
use firn_oci::job_hook::{self, Answer, Call, Facts, GpuAddress, JobHook, JobHookError};
use firn_process::cancel::{CancellationToken, Interrupted};
use firn_process::reaper::Reaper;

use crate::container::Container;

/// How much longer than the hook firn-hook may take.
const GRACE: Duration = Duration::from_secs(5);

/// How many lines of a hook's output are logged and quoted.
const LINES: usize = 10;

/// A hook that failed, or could not be called.
#[derive(Debug, thiserror::Error, Problem)]
pub enum HookError {
    #[error("the container's hook {} failed: {why}{}", hook.name(), quoted(output))]
    #[problem(
        hook.code(),
        "correct what the annotation names; firn-hook-NAME.log in the bundle and containerd's log have its \
         output"
    )]
    Failed {
        hook: JobHook,
        why: String,
        output: String,
    },
    #[error("the configuration of this node forbids hooks of containers, and this one names some")]
    #[problem(
        "FIRN-HOOK-FORBIDDEN",
        "hooks = \"run\" under [checkpoint] in the configuration allows them"
    )]
    Forbidden,
    #[error(transparent)]
    Setting(#[from] JobHookError),
    #[error(transparent)]
    Program(#[from] firn_config::ProgramError),
}

fn quoted(output: &str) -> String {
    match last_lines(output) {
        lines if lines.is_empty() => String::new(),
        lines => format!("; its output: {}", lines.join("; ")),
    }
}

/// The last lines of a text that are not empty.
fn last_lines(text: &str) -> Vec<&str> {
    let lines: Vec<&str> = text
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .collect();
    lines[lines.len().saturating_sub(LINES)..].to_vec()
}

/// Where hooks are called.
#[derive(Clone, Copy)]
pub(crate) struct Caller<'a> {
    pub container: &'a Container,
    pub config: &'a Config,
    pub reaper: &'a Reaper,
    pub cancel: &'a CancellationToken,
}

/// Refuses a container that names hooks where the configuration forbids them.
pub(crate) fn admit(spec: &Spec, config: &Config) -> Result<(), HookError> {
    match config.checkpoint.hooks {
        JobHooks::Refuse if job_hook::any_is_named(spec) => Err(HookError::Forbidden),
        _ => Ok(()),
    }
}

impl Caller<'_> {
    /// Calls the hook of the facts, which the container names, and waits for its success. `init` is the pid
    /// of the container's init.
    pub async fn call(self, init: i32, facts: Facts) -> Result<(), Interrupted<HookError>> {
        let (hook, id) = (facts.hook, &self.container.id);
        log::info!("hook {} of {id} is called", hook.name());
        let answer = self.run(init, facts, true).await?;
        for line in last_lines(&answer.output) {
            log::info!("hook {} of {id}: {line}", hook.name());
        }
        Ok(result_of(hook, answer)?)
    }

    /// Whether the container names a hook. A container that names any is refused where the configuration
    /// forbids them.
    pub fn names(self, hook: JobHook) -> Result<bool, HookError> {
        let spec = Spec::load(&self.container.bundle).map_err(JobHookError::Spec)?;
        admit(&spec, self.config)?;
        Ok(hook.is_named(&spec))
    }

    /// Writes the facts for a job that names hooks, and calls nothing.
    pub async fn write_facts(self, init: i32, facts: Facts) -> Result<(), Interrupted<HookError>> {
        let hook = facts.hook;
        Ok(result_of(hook, self.run(init, facts, false).await?)?)
    }

    async fn run(self, init: i32, facts: Facts, calls: bool) -> Result<Answer, Interrupted<HookError>> {
        let deadlines = &self.config.deadlines;
        let limit = match facts.hook {
            JobHook::Prepare => deadlines.prepare,
            JobHook::Resumed => deadlines.resumed,
            JobHook::Restored => deadlines.restored,
            JobHook::Failed => deadlines.failed,
        };
        let hook = facts.hook;
        let failed = |why| HookError::Failed {
            hook,
            why,
            output: String::new(),
        };
        let started = if init == self.container.init.pid() {
            self.container.init.started()
        } else {
            procfs::started(init)
        };
        let started = started.ok_or_else(|| failed(format!("process {init} has ended")))?;
        let program = find_program(names::HOOK_PROGRAM, self.config.hook.path.as_deref());
        let program = program.map_err(HookError::from)?;
        let call = Call {
            bundle: self.container.bundle.clone(),
            init,
            started: Some(started),
            calls,
            exec: self.container.runc.exec_arguments(),
            id: self.container.id.clone(),
            limit: u64::try_from(limit.as_millis()).unwrap_or(u64::MAX),
            facts,
        };
        let input = serde_json::to_vec(&call).map_err(|error| failed(error.to_string()))?;
        let mut command = Command::new(&program);
        command.arg("call");
        let output = self
            .reaper
            .output_with_input(&mut command, &input, limit.saturating_add(GRACE));
        let output = self
            .cancel
            .unless_cancelled(output)
            .await
            .ok_or(Interrupted::Cancelled)?;
        let printed = output.map_err(|error| Chain(&error).to_string());
        match printed.and_then(|output| output.printed()) {
            Ok(printed) => Ok(serde_json::from_slice(&printed).map_err(|error| failed(error.to_string()))?),
            Err(why) => {
                self.end(&program, &input).await;
                Err(failed(why).into())
            }
        }
    }

    /// Ends the processes of a call that was given up. Their hook has failed: what they still did would come
    /// after the next hook.
    async fn end(self, program: &Path, call: &[u8]) {
        let mut command = Command::new(program);
        command.arg("end-call");
        let ended = self.reaper.output_with_input(&mut command, call, GRACE).await;
        let ended = ended.map_err(|error| Chain(&error).to_string());
        if let Err(error) = ended.and_then(|output| output.printed()) {
            log::warn!("a hook of {} may still run: {error}", self.container.id);
        }
    }
}

fn result_of(hook: JobHook, Answer { failure, output }: Answer) -> Result<(), HookError> {
    match failure {
        None => Ok(()),
        Some(why) => Err(HookError::Failed { hook, why, output }),
    }
}

/// The facts of a hook, without GPUs: `checkpoint` is the id, `image` the image directory.
pub(crate) fn facts(hook: JobHook, checkpoint: &str, image: &Path) -> Facts {
    let operation = match hook {
        JobHook::Restored => "restore",
        JobHook::Prepare | JobHook::Resumed | JobHook::Failed => "checkpoint",
    };
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let image = image.file_name().unwrap_or_default();
    Facts {
        hook,
        operation: operation.to_owned(),
        checkpoint: checkpoint.to_owned(),
        image: image.to_string_lossy().into_owned(),
        host: host.trim().to_owned(),
        gpus: Vec::new(),
        pci_changed: false,
        error: None,
    }
}

/// How the facts name a GPU.
pub(crate) fn address(uuid: &GpuUuid, pci: &str) -> GpuAddress {
    GpuAddress {
        uuid: uuid.to_string(),
        pci: pci.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_quotes_the_end_of_the_output() {
        let output = (0..40).map(|n| format!("line {n}\n\n")).collect();
        let error = HookError::Failed {
            hook: JobHook::Prepare,
            why: "it ended with exit status 3".to_owned(),
            output,
        };
        assert_eq!(error.code(), "FIRN-HOOK-PREPARE");
        let text = error.to_string();
        assert!(
            text.starts_with(
                "the container's hook prepare failed: it ended with exit status 3; its output: line 30; "
            ),
            "{text}"
        );
        assert!(text.ends_with("; line 39"), "{text}");
    }
}
