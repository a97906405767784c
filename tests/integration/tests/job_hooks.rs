//! Hooks of the job: what is called around a checkpoint and a restore, with which facts, and what becomes of
//! both when a hook fails.
//!
//! Needs root.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use firn_lab::{
    BUNDLES, COUNTER, Container, GpuHost, SimGpu, cases, failure, matrix, nothing_left,
    nothing_left_but_metadata, on,
};
use firn_node::{Platform, Process, wait_for};
use serde_json::Value;

const WAIT: Duration = Duration::from_secs(60);

/// A program of the job that writes what it is called with.
const HOOK: &str = "cat >/hook <<'E'\n#!/bin/sh\n\
    echo \"$FIRN_HOOK $FIRN_OPERATION $FIRN_CHECKPOINT $FIRN_HOST $FIRN_OLD_GPUS>$FIRN_NEW_GPUS \
    $FIRN_OLD_PCI>$FIRN_NEW_PCI $FIRN_PCI_CHANGED $1 $FIRN_ERROR\" >>/calls\n\
    cp /run/firn/hook.json /$FIRN_HOOK.json\necho output of $FIRN_HOOK\nE\n\
    chmod +x /hook\n";

const HOOKS: [&str; 4] = ["prepare", "resumed", "restored", "failed"];

/// A node with one GPU that no other node has.
fn host(platform: Platform, name: &str, gpu: u32) -> Result<GpuHost> {
    GpuHost::for_test(platform, name, &[SimGpu::h200(gpu)])
}

/// A job with these annotations `hook-NAME`, in which [`HOOK`] is /hook. `before` goes before its counter,
/// `after` follows.
fn job_with<'h>(
    host: &'h GpuHost,
    hooks: &[(&str, &str)],
    options: &[&str],
    before: &str,
    after: &str,
) -> Result<Container<'h>> {
    let mut given: Vec<String> = options.iter().map(ToString::to_string).collect();
    for (hook, value) in hooks {
        given.push("--annotation".to_owned());
        given.push(format!("firn.dev/hook-{hook}={value}"));
    }
    let given: Vec<&str> = given.iter().map(String::as_str).collect();
    let script = format!("{HOOK}{before}\n{COUNTER} &\n{after}\nwhile :; do sleep 0.2; done");
    let job = Container::script(host, "job", &["0"], 1, &given, &script)?;
    job.goes_on(3)?;
    Ok(job)
}

fn job<'h>(host: &'h GpuHost, hooks: &[(&str, &str)]) -> Result<Container<'h>> {
    job_with(host, hooks, &[], "", "")
}

/// The words of each call that [`HOOK`] has noted.
fn calls(job: &Container<'_>) -> Result<Vec<Vec<String>>> {
    let text = job.exec(&["sh", "-c", "cat /calls 2>/dev/null || true"])?;
    let words = |line: &str| line.split(' ').map(str::to_owned).collect();
    Ok(text.lines().map(words).collect())
}

fn names(calls: &[Vec<String>]) -> Vec<&str> {
    calls.iter().map(|call| &*call[0]).collect()
}

fn output_is_kept(host: &GpuHost) -> Result<()> {
    let kept = host.node().read(format!("{BUNDLES}/job/firn-hook-prepare.log"))?;
    ensure!(kept == "output of prepare\n", "{kept:?}");
    let log = host.log();
    ensure!(log.contains("hook prepare of job: output of prepare"), "{log}");
    Ok(())
}

fn hooks_are_called_with_what_has_changed(platform: Platform) -> Result<()> {
    let hosts = [host(platform, "jh-a", 1)?, host(platform, "jh-b", 2)?];
    on(hosts, |[a, b]| {
        let all = HOOKS.map(|hook| (hook, "exec: /hook with-argument"));
        let source = job(a, &all)?;
        source.checkpoint("checkpoint/job")?;
        source.goes_on(3)?;
        let noted = calls(&source)?;
        ensure!(names(&noted) == ["prepare", "resumed"], "{noted:?}");
        let (old, new) = (&a.uuids()[0], &b.uuids()[0]);
        for call in &noted {
            ensure!(call[1] == "checkpoint" && call[2].len() == 36, "{call:?}");
            ensure!(call[4] == format!("{old}>") && call[6] == "0", "{call:?}");
            ensure!(call[7] == "with-argument", "{call:?}");
        }
        output_is_kept(a)?;

        // A failure after the hook prepare.
        a.fault(&["--call", "checkpoint", "--error", "CUDA_ERROR_LAUNCH_FAILED"])?;
        failure(source.checkpoint("checkpoint/never"))?;
        a.no_faults()?;
        source.goes_on(3)?;
        let now = calls(&source)?;
        ensure!(names(&now[2..]) == ["prepare", "failed"], "{now:?}");
        ensure!(now[2][2] == now[3][2] && now[2][2] != noted[0][2], "{now:?}");
        ensure!(now[3].join(" ").contains("CUDA_ERROR_LAUNCH_FAILED"), "{now:?}");
        a.send_image("checkpoint/job", b)?;
        source.remove()?;
        a.idle()?;

        let (copy, _) = Container::restore(b, "job", "checkpoint/job", 1)?;
        // Start returns after the hook.
        let in_copy = calls(&copy)?;
        let restored = in_copy.last().context("no call")?;
        ensure!(names(&in_copy).last() == Some(&"restored"), "{in_copy:?}");
        ensure!(
            restored[1] == "restore" && restored[2] == noted[0][2],
            "{restored:?}"
        );
        ensure!(restored[4] == format!("{old}>{new}"), "{restored:?}");
        let facts: Value = serde_json::from_str(&copy.exec(&["cat", "/run/firn/restore.json"])?)?;
        ensure!(
            facts["gpus"][0]["new"]["uuid"] == **new && facts["gpus"][0]["old"]["uuid"] == **old,
            "{facts}"
        );
        ensure!(
            facts["checkpoint"] == *restored[2] && facts["hook"] == "restored",
            "{facts}"
        );
        let of_call: Value = serde_json::from_str(&copy.exec(&["cat", "/restored.json"])?)?;
        ensure!(of_call == facts, "{of_call} is not {facts}");
        copy.goes_on(3)?;
        copy.checkpoints_again("checkpoint/job")?;
        let last = calls(&copy)?;
        ensure!(
            names(&last[last.len() - 2..]) == ["prepare", "resumed"],
            "{last:?}"
        );
        copy.remove()?;
        b.idle()
    })
}

/// The image's labels name hooks. The container replaces one, and its copy on a node whose image has no
/// labels has them, too.
fn hooks_come_from_labels_of_the_image(platform: Platform) -> Result<()> {
    let hosts = [host(platform, "jh-la", 1)?, host(platform, "jh-lb", 2)?];
    on(hosts, |[a, b]| {
        let labels = HOOKS.map(|hook| (format!("firn.dev/hook-{hook}"), "exec: /hook by-image"));
        let labels = labels.each_ref().map(|(name, value)| (&**name, *value));
        a.label_image(&labels)?;
        let called = |job: &Container<'_>| -> Result<Vec<String>> {
            let calls = calls(job)?;
            Ok(calls
                .iter()
                .map(|call| format!("{} {}", call[0], call[7]))
                .collect())
        };
        let source = job(a, &[("resumed", "exec: /hook by-container")])?;
        source.checkpoint("checkpoint/job")?;
        let calls = called(&source)?;
        ensure!(calls == ["prepare by-image", "resumed by-container"], "{calls:?}");
        a.send_image("checkpoint/job", b)?;
        source.remove()?;
        a.idle()?;

        let (copy, _) = Container::restore(b, "job", "checkpoint/job", 1)?;
        copy.goes_on(3)?;
        copy.checkpoints_again("checkpoint/job")?;
        let calls = called(&copy)?;
        let expected = ["restored by-image", "prepare by-image", "resumed by-container"];
        ensure!(calls == expected, "{calls:?}");
        let facts: Value = serde_json::from_str(&copy.exec(&["cat", "/run/firn/restore.json"])?)?;
        ensure!(facts["hook"] == "restored", "{facts}");
        copy.remove()?;
        b.idle()
    })
}

/// An HTTP server that notes requests and answers with the status in /status, and a handler of USR1 that
/// answers with the text in /reply. The file of the job has the facts before the signal comes.
const SERVER: &str = "cat >/serve <<'E'\n#!/bin/sh\nread method path version\n\
    while read -r header && test \"$header\" != \"$(printf '\\r')\"; do \
    case $header in *ength:*) n=$(echo ${header#*:} | tr -d '\\r ');; esac; done\n\
    body=$(head -c ${n:-0})\necho \"$method $path $body\" >>/requests\n\
    printf 'HTTP/1.1 %s\\r\\nContent-Length: 5\\r\\nConnection: close\\r\\n\\r\\nhello' \
    \"$(cat /status)\"\nE\n\
    chmod +x /serve; echo 200 OK >/status; echo ok >/reply\n\
    trap 'cp /run/firn/hook.json /signalled; cat /reply >/run/firn/a; mv /run/firn/a /run/firn/answer' USR1";

const SERVE: &str = "nc -ll -p 8000 -e /serve &";

fn jobs_are_called_by_http_and_by_signal(platform: Platform) -> Result<()> {
    on([host(platform, "jh-kinds", 1)?], |[host]| {
        let hooks = [
            (
                "prepare",
                "http://localhost:8000/sleep?level=1 {\"tags\": [\"x\"]}",
            ),
            ("resumed", "signal: USR1"),
            ("restored", "http://127.0.0.1:8000/wake_up"),
        ];
        let source = job_with(host, &hooks, &[], SERVER, SERVE)?;
        source.checkpoint("checkpoint/job")?;
        source.goes_on(3)?;
        let requests = source.exec(&["cat", "/requests"])?;
        ensure!(
            requests == "POST /sleep?level=1 {\"tags\": [\"x\"]}\n",
            "{requests}"
        );
        let facts: Value = serde_json::from_str(&source.exec(&["cat", "/signalled"])?)?;
        ensure!(facts["hook"] == "resumed", "{facts}");
        source.remove()?;
        host.idle()?;

        let (copy, _) = Container::restore(host, "job", "checkpoint/job", 1)?;
        let requests = copy.exec(&["cat", "/requests"])?;
        let last = requests.lines().last().unwrap_or_default();
        let body = last.strip_prefix("POST /wake_up ").context(requests.clone())?;
        let facts: Value = serde_json::from_str(body)?;
        ensure!(facts["hook"] == "restored", "{facts}");
        copy.goes_on(3)?;
        copy.remove()?;
        host.idle()
    })
}

/// Values of `hook-prepare` that fail, and what the client reads of it.
const FAILURES: [(&str, &str); 12] = [
    ("exec: /bin/sh -c exit${IFS}3", "ended with exit status 3"),
    (
        "exec: [\"sh\", \"-c\", \"echo why; exit 3\"]",
        "exit status 3; its output: why",
    ),
    (
        "exec: [\"sh\", \"-c\", \"kill -SEGV $$\"]",
        "was ended by SIGSEGV",
    ),
    (
        "exec: [\"sh\", \"-c\", \"sleep 1000 & sleep 1000\"]",
        "has not ended in time",
    ),
    ("exec: /nonexistent", "has not started /nonexistent"),
    ("http://localhost:8000/fails", "answered 500"),
    (
        "http://localhost:8001/nobody",
        "cannot call http://127.0.0.1:8001/nobody",
    ),
    (
        "http://localhost:8002/hangs",
        "cannot call http://127.0.0.1:8002/hangs",
    ),
    ("signal: USR1", "the job answered: not now"),
    ("signal: USR2", "has no handler for SIGUSR2"),
    ("signal: HUP", "has not answered in time"),
    (
        "exec: [\"sh\", \"-c\", \"yes | head -c 9000000; exit 1\"]",
        "exit status 1; its output: y; y",
    ),
];

fn a_prepare_hook_that_fails_cancels_the_checkpoint(platform: Platform) -> Result<()> {
    on([host(platform, "jh-fail", 1)?], |[host]| {
        host.configure("[deadlines]\nprepare = \"2s\"\n")?;
        host.watch_runc()?;
        for (value, expected) in FAILURES {
            let before = format!("{SERVER}\necho 500 No >/status; echo not now >/reply; trap : HUP");
            let after = format!("{SERVE} nc -ll -p 8002 -e sleep 1000 &");
            let hooks = [("prepare", value), ("failed", "exec: /hook")];
            let job = job_with(host, &hooks, &[], &before, &after)?;
            let output = failure(job.checkpoint("checkpoint/job")).with_context(|| value.to_owned())?;
            ensure!(
                output.contains("FIRN-HOOK-PREPARE") && output.contains(expected),
                "{value}: {output}"
            );
            ensure!(!host.runc_has("checkpoint")?, "{value}: runc was called");
            job.goes_on(3)?;
            let noted = calls(&job)?;
            ensure!(
                names(&noted) == ["failed"] && noted[0].join(" ").contains("FIRN-HOOK-PREPARE: "),
                "{value}: {noted:?}"
            );
            let left = job.exec(&["ps", "-o", "args"])?;
            let is_hook = |line: &&str| *line == "sleep 1000" && !value.contains("hangs");
            ensure!(
                !left.lines().any(|line| is_hook(&line)),
                "{value} has left {left}"
            );
            job.remove()?;
            host.idle()?;
        }
        Ok(())
    })
}

/// What a hook does and what it has started ends with its firn-hook, whenever that is killed: no word of it
/// comes after the hook `failed`.
fn a_hook_ends_with_its_firn_hook_before_the_next_is_called(platform: Platform) -> Result<()> {
    on([host(platform, "jh-end", 1)?], |[host]| {
        let late = "sleep 2; echo late >>/calls";
        // The program itself drops firn's variables after a while.
        let later = format!("sleep 0.3; exec env -i sh -c \\\"trap '' TERM HUP; {late}\\\"");
        let prepare = format!("exec: [\"sh\", \"-c\", \"setsid sh -c '{late}' & touch /waits; {later}\"]");
        let job = job(host, &[("prepare", &prepare), ("failed", "exec: /hook")])?;
        let is_call = |process: &Process| {
            process.command == "firn-hook" && process.args.get(1).is_some_and(|verb| verb == "call")
        };
        let waits = host.node().path(format!("{BUNDLES}/job/rootfs/waits"));
        // While the runtime starts the program, and while that runs.
        for (round, ready) in [0, 20, 40, 60, 80]
            .iter()
            .map(|ms| (ms, false))
            .chain([(&500, true)])
        {
            let mut client = host.node().spawn(&["ctr", "tasks", "checkpoint", "job"])?;
            let pid = wait_for("firn-hook", WAIT, || {
                let found = host.node().processes().into_iter().find(is_call);
                Ok(found
                    .filter(|_| !ready || waits.exists())
                    .map(|process| process.pid))
            })?;
            std::thread::sleep(Duration::from_millis(*round));
            host.node().run(&["kill", "-KILL", &pid.to_string()])?;
            ensure!(!client.wait()?.success(), "the checkpoint has succeeded");
            let noted = calls(&job)?;
            let last = noted.last().context("no call")?;
            ensure!(
                last[0] == "failed" && last.join(" ").contains("FIRN-HOOK-PREPARE"),
                "{last:?}"
            );
            let left = job.exec(&["ps", "-o", "args"])?;
            ensure!(!left.contains("late"), "after {round} ms: {left}");
            if waits.exists() {
                job.exec(&["rm", "/waits"])?;
            }
        }
        std::thread::sleep(Duration::from_secs(3));
        let noted = calls(&job)?;
        ensure!(names(&noted) == ["failed"; 6], "{noted:?}");
        job.goes_on(3)?;
        job.remove()?;
        host.idle()
    })
}

/// The image stays good: where the hook succeeds it is restored.
fn a_restored_hook_that_fails_ends_the_restore(platform: Platform) -> Result<()> {
    let hosts = [host(platform, "jh-r", 1)?, host(platform, "jh-s", 2)?];
    on(hosts, |[a, b]| {
        b.configure("[deadlines]\nrestored = \"2s\"\n")?;
        for fails in ["exit 4", "kill -KILL $$", "sleep 1000"] {
            let value = format!(
                "exec: [\"sh\", \"-c\", \"test $FIRN_NEW_GPUS = {} || {{ echo not here; {fails}; }}\"]",
                a.uuids()[0]
            );
            let source = job(a, &[("restored", &value)])?;
            source.checkpoint("checkpoint/job")?;
            source.goes_on(3)?;
            a.send_image("checkpoint/job", b)?;
            source.remove()?;
            let output = failure(Container::restore(b, "job", "checkpoint/job", 1))?;
            ensure!(
                output.contains("FIRN-HOOK-RESTORED") && output.contains("not here"),
                "{fails}: {output}"
            );
            nothing_left_but_metadata(b, "job")?;
            b.idle()?;
            b.remove_image("checkpoint/job")?;
            let (copy, _) = Container::restore(a, "job", "checkpoint/job", 1)?;
            copy.goes_on(3)?;
            copy.remove()?;
            a.remove_image("checkpoint/job")?;
            a.idle()?;
        }
        Ok(())
    })
}

/// ctr has paused the job: the hook is called by its Resume, and the checkpoint is there.
fn a_resumed_hook_that_fails_keeps_the_image(platform: Platform) -> Result<()> {
    on([host(platform, "jh-res", 1)?], |[host]| {
        let hooks = [("resumed", "exec: /bin/false"), ("failed", "exec: /bin/false")];
        let source = job(host, &hooks)?;
        source.checkpoint("checkpoint/job")?;
        let logged = |code: &str| {
            let (log, expected) = (
                host.log(),
                format!("{code}: container job continues after its checkpoint"),
            );
            ensure!(log.contains(&expected), "{log}");
            Ok(())
        };
        logged("FIRN-HOOK-RESUMED")?;
        source.goes_on(3)?;
        host.fault(&["--call", "checkpoint", "--error", "CUDA_ERROR_LAUNCH_FAILED"])?;
        let output = failure(source.checkpoint("checkpoint/never"))?;
        ensure!(output.contains("CUDA_ERROR_LAUNCH_FAILED"), "{output}");
        logged("FIRN-HOOK-FAILED")?;
        host.no_faults()?;
        source.goes_on(3)?;
        source.remove()?;
        let (copy, _) = Container::restore(host, "job", "checkpoint/job", 1)?;
        copy.goes_on(3)?;
        copy.remove()?;
        host.idle()
    })
}

fn hooks_can_be_forbidden_and_wrong_ones_are_refused_at_create(platform: Platform) -> Result<()> {
    on([host(platform, "jh-no", 1)?], |[host]| {
        for (annotation, named) in [
            ("firn.dev/hook-prepare=/hook", "firn.dev/hook-prepare"),
            ("firn.dev/hook-prepare=http://example.com/", "loopback"),
            ("firn.dev/ipc=released-by-hook", "firn.dev/hook-prepare"),
        ] {
            let options = ["--annotation", annotation];
            let output = failure(Container::count_with(host, "wrong", &["0"], 1, &options, &[]))?;
            ensure!(
                output.contains("FIRN-HOOK-SETTING") && output.contains(named),
                "{output}"
            );
            nothing_left_but_metadata(host, "wrong")?;
        }
        for (hook, called) in [("prepare", &["prepare"][..]), ("restored", &[])] {
            host.configure("")?;
            let source = job(host, &[(hook, "exec: /hook")])?;
            source.checkpoint("checkpoint/job")?;
            ensure!(names(&calls(&source)?) == called, "{hook}");

            host.configure("[checkpoint]\nhooks = \"refuse\"\n")?;
            let output = failure(source.checkpoint("checkpoint/forbidden"))?;
            ensure!(output.contains("FIRN-HOOK-FORBIDDEN"), "{hook}: {output}");
            source.goes_on(3)?;
            source.remove()?;
            let output = failure(Container::restore(host, "job", "checkpoint/job", 1))?;
            ensure!(output.contains("FIRN-HOOK-FORBIDDEN"), "{hook}: {output}");
            nothing_left_but_metadata(host, "job")?;
            host.remove_image("checkpoint/job")?;
        }
        host.idle()
    })
}

/// A job that is killed while its hook runs ends at once, also with its shim, and so does one whose restore
/// waits for the hook.
fn a_job_is_killed_while_its_hook_runs(platform: Platform) -> Result<()> {
    on([host(platform, "jh-kill", 1)?], |[host]| {
        let hang = "exec: [\"sh\", \"-c\", \"test -e /go || { touch /waits; sleep 1000; }\"]";
        let waits = || {
            wait_for("the hook", WAIT, || {
                let path = format!("{BUNDLES}/job/rootfs/waits");
                Ok(host.node().path(path).exists().then_some(()))
            })
        };
        for shim in [false, true] {
            let source = job(host, &[("prepare", hang)])?;
            let mut client = host.node().spawn(&["ctr", "tasks", "checkpoint", "job"])?;
            waits()?;
            if shim {
                host.kill_shim("job")?;
            } else {
                source.task(&["kill", "--signal", "SIGKILL"])?;
                source.becomes("STOPPED")?;
            }
            ensure!(!client.wait()?.success(), "the checkpoint has succeeded");
            if shim {
                nothing_left_but_metadata(host, "job")?;
            } else {
                source.remove()?;
            }
            host.idle()?;
        }

        let source = job_with(host, &[("restored", hang)], &[], "", "")?;
        source.checkpoint("checkpoint/job")?;
        source.remove()?;
        let mut client = Container::begin_restore(host, "job", "checkpoint/job")?;
        waits()?;
        let copy = Container::known(host, "job");
        copy.task(&["kill", "--signal", "SIGKILL"])?;
        ensure!(!client.wait()?.success(), "the restore has succeeded");
        host.node().run(&[
            "sh",
            "-c",
            "ctr tasks rm job; ctr containers rm job; ctr snapshots rm job; true",
        ])?;
        nothing_left(host, "job")?;
        host.idle()
    })
}

const RANKS: &str = "gpu-counter --out /counter.log --interval-ms 50 --mib 8 --ranks 2 --gpu 0,1 \
    --communicator /run/firn/released";

/// Ranks that share GPU memory let go of it in their hook.
fn ranks_move_once_their_hook_has_released_what_they_share(platform: Platform) -> Result<()> {
    let two = |name, first| {
        let gpus = [SimGpu::h200(first), SimGpu::h200(first + 1)];
        GpuHost::for_test(platform, name, &gpus)
    };
    on([two("jh-x", 1)?, two("jh-y", 3)?], |[a, b]| {
        let options = |prepare| {
            let mut options = vec![
                "--annotation".to_owned(),
                "firn.dev/ipc=released-by-hook".to_owned(),
            ];
            for (hook, value) in [
                ("prepare", prepare),
                ("resumed", "exec: rm /run/firn/released"),
                ("restored", "exec: rm /run/firn/released"),
                ("failed", "exec: rm -f /run/firn/released"),
            ] {
                options.extend(["--annotation".to_owned(), format!("firn.dev/hook-{hook}={value}")]);
            }
            options
        };
        let ranks = |host, prepare| {
            let options = options(prepare);
            let options: Vec<&str> = options.iter().map(String::as_str).collect();
            let job = Container::script(host, "job", &["0", "1"], 2, &options, &format!("exec {RANKS}"))?;
            job.goes_on(3)?;
            Ok::<_, anyhow::Error>(job)
        };
        let liar = ranks(a, "exec: true")?;
        let output = failure(liar.checkpoint("checkpoint/never"))?;
        ensure!(
            output.contains("FIRN-IPC-HELD") && output.contains("NCCL communicator"),
            "{output}"
        );
        liar.goes_on(3)?;
        liar.remove()?;
        a.idle()?;

        let source = ranks(
            a,
            "exec: [\"sh\", \"-c\", \"touch /run/firn/released; sleep 0.5\"]",
        )?;
        let audit = a.node().run(&["firn", "audit", "job"])?.stdout;
        ensure!(audit.contains("the hook prepare has to release"), "{audit}");
        source.checkpoint("checkpoint/job")?;
        source.goes_on(3)?;
        a.send_image("checkpoint/job", b)?;
        source.remove()?;
        a.idle()?;
        let (copy, _) = Container::restore(b, "job", "checkpoint/job", 2)?;
        copy.goes_on(3)?;
        copy.checkpoints_again("checkpoint/job")?;
        copy.remove()?;
        b.idle()
    })
}

pub(crate) fn suite() -> matrix::Suite {
    matrix::Suite::new(&cases! {
        hooks_are_called_with_what_has_changed [FORKY, TRIXIE];
        hooks_come_from_labels_of_the_image [FORKY];
        jobs_are_called_by_http_and_by_signal [FORKY];
        a_prepare_hook_that_fails_cancels_the_checkpoint [FORKY, TRIXIE];
        a_hook_ends_with_its_firn_hook_before_the_next_is_called [FORKY_V2, TRIXIE];
        a_restored_hook_that_fails_ends_the_restore [FORKY, TRIXIE];
        a_resumed_hook_that_fails_keeps_the_image [FORKY];
        hooks_can_be_forbidden_and_wrong_ones_are_refused_at_create [FORKY];
        a_job_is_killed_while_its_hook_runs [FORKY, FORKY_V2];
        ranks_move_once_their_hook_has_released_what_they_share [FORKY_V2];
    })
}
