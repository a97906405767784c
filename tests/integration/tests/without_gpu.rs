//! Containers without GPUs: what a user sees with firn is what containerd's own shim shows.
//!
//! Every scenario runs first with containerd's own shim, whose answer must be the expected one, and then with
//! firn, whose answer must be the same. On forky firn goes by its own name, on trixie it stands in under the
//! stock shim's.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use containerd_shim_protos::shim::oci::CheckpointOptions;
use firn_lab::{
    Archive, BUNDLES, Claims, CommandOutput, Container, FIRN, GpuHost, IMAGE, STOCK, SimGpu, Task, cases,
    describe, matrix, on,
};
use firn_node::{Platform, wait_for};

const LIMIT: Duration = Duration::from_secs(60);

/// Writes the next number to /log again and again. It starts no program: the freezer cannot stop a shell
/// between vfork and exec, and the dump of containerd's shim fails then.
const COUNT: &str = "i=0; while :; do i=$((i+1)); echo $i >>/log; \
                     j=0; while [ $j -lt 20000 ]; do j=$((j+1)); done; done";

/// What a user does with a container of this runtime, and what is seen of it.
type Scenario = fn(&GpuHost, &str) -> Result<String>;

/// Runs a scenario with both shims; `expected` is part of what is seen with the first.
fn same(platform: Platform, name: &str, claim: &str, scenarios: &[(&str, &str, Scenario)]) -> Result<()> {
    let gpus = [SimGpu::h200(1)];
    let host = GpuHost::for_test(platform, name, &gpus)?;
    on([host], |[host]| {
        let mut stock = Vec::new();
        for (what, expected, scenario) in scenarios {
            let seen = scenario(host, STOCK).with_context(|| format!("{what}, stock"))?;
            ensure!(seen.contains(expected), "{what}: no {expected:?} in\n{seen}");
            stock.push(seen);
        }
        let firn = host.runtime_for_options()?;
        let probe = start(host, firn, COUNT)?;
        let shim = host.shim_of("c")?;
        let program = shim.args.first().map_or("", String::as_str);
        ensure!(program.starts_with("/usr/local/bin/"), "{program} is not firn");
        probe.remove()?;
        for ((what, _, scenario), stock) in scenarios.iter().zip(stock) {
            let seen = scenario(host, firn).with_context(|| format!("{what}, firn"))?;
            let (seen, stock) = (timeless(&seen), timeless(&stock));
            ensure!(seen == stock, "{what}: {}", difference(&stock, &seen));
        }
        Claims::of_ctr(host, firn)?.works(claim)?;
        host.idle()
    })
}

/// Where two texts differ, line by line.
fn difference(stock: &str, firn: &str) -> String {
    let (stock, firn): (Vec<_>, Vec<_>) = (stock.lines().collect(), firn.lines().collect());
    let at = stock
        .iter()
        .zip(&firn)
        .take_while(|(one, other)| one == other)
        .count();
    let from = at.saturating_sub(2);
    let part = |lines: &[&str]| lines[from..lines.len().min(at + 6)].join("\n");
    format!(
        "from line {at} on\nthe stock shim:\n{}\nfirn:\n{}",
        part(&stock),
        part(&firn)
    )
}

/// Without the time stamps of ctr's own warnings.
fn timeless(seen: &str) -> String {
    let mut parts = seen.split("time=\"");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |text, part| {
        text + part.split_once('"').map_or("", |(_, rest)| rest)
    })
}

/// `ctr run` in the foreground.
fn run(
    host: &GpuHost,
    runtime: &str,
    options: &[&str],
    command: &[&str],
    stdin: &str,
) -> Result<CommandOutput> {
    let start = ["run", "--rm", "--runtime", runtime];
    host.ctr(
        &[&start[..], host.limits(), options, &[IMAGE, "c"], command].concat(),
        stdin,
    )
}

/// `ctr run --detach`.
fn start<'h>(host: &'h GpuHost, runtime: &str, script: &str) -> Result<Container<'h>> {
    Container::run(host, "c", &["--runtime", runtime], &["sh", "-c", script])
}

fn exit_code_and_output(host: &GpuHost, runtime: &str) -> Result<String> {
    let output = run(
        host,
        runtime,
        &[],
        &["sh", "-c", "echo out; echo err >&2; exit 42"],
        "",
    )?;
    firn_lab::nothing_left(host, "c")?;
    Ok(output.to_string())
}

fn killed_by_a_signal(host: &GpuHost, runtime: &str) -> Result<String> {
    let output = run(
        host,
        runtime,
        &[],
        &["sh", "-c", "sh -c 'kill -SEGV $$'; echo code $?"],
        "",
    )?;
    Ok(output.to_string())
}

/// Standard input up to its end. ctr loses an end that comes before the container runs, so that is waited
/// for.
fn standard_input(host: &GpuHost, runtime: &str) -> Result<String> {
    let limits = host.limits().join(" ");
    let mount = "--mount type=bind,src=/tmp/shared,dst=/shared,options=rbind:rw";
    let inner = "touch /shared/runs; while read line; do echo got $line; done; echo end";
    let line = format!(
        "rm -rf /tmp/shared; mkdir /tmp/shared
         (echo one; until [ -e /tmp/shared/runs ]; do sleep 0.02; done; echo two) |
         ctr run --rm --runtime {runtime} {limits} {mount} {IMAGE} c sh -c '{inner}'"
    );
    Ok(host.output_of(&["sh", "-c", &line], "")?.to_string())
}

fn much_output(host: &GpuHost, runtime: &str) -> Result<String> {
    // ctr loses what is on its way when the container ends, with either shim.
    let output = run(host, runtime, &[], &["sh", "-c", "seq 200000; sleep 1"], "")?;
    let lines = output
        .stdout
        .lines()
        .zip(1..)
        .filter(|(line, number)| *line == format!("{number}"));
    Ok(format!(
        "{} lines in order, {} bytes",
        lines.count(),
        output.stdout.len()
    ))
}

fn a_program_that_is_not_there(host: &GpuHost, runtime: &str) -> Result<String> {
    let output = run(host, runtime, &[], &["/nosuch"], "")?;
    firn_lab::nothing_left(host, "c")?;
    Ok(output.to_string())
}

fn a_terminal(host: &GpuHost, runtime: &str) -> Result<String> {
    let limits = host.limits().join(" ");
    // ctr 1.7 may lose what a terminal shows right before its container ends.
    let inner = "sh -c 'tty; until stty size 2>&1 | grep [1-9]; do sleep 0.05; done; sleep 1; exit 3'";
    let line =
        format!("stty rows 31 cols 97; ctr run --rm -t --runtime {runtime} {limits} {IMAGE} c {inner}");
    let output = host.output_of(
        &["script", "--quiet", "--return", "--command", &line, "/dev/null"],
        "",
    )?;
    firn_lab::nothing_left(host, "c")?;
    // script sends the end of its input as a character, and the terminal shows it at some place.
    Ok(output.to_string().replace("^@", "").replace(['\0', '\r'], ""))
}

fn runs_are_as_with_the_stock_shim(platform: Platform) -> Result<()> {
    same(platform, "pl-r", "`run` without a GPU", RUNS)
}

const RUNS: &[(&str, &str, Scenario)] = &[
    ("exit code and output", "code 42", exit_code_and_output),
    ("killed by a signal", "code 139", killed_by_a_signal),
    ("standard input", "got two", standard_input),
    ("much output", "200000 lines in order", much_output),
    (
        "a program that is not there",
        "/nosuch",
        a_program_that_is_not_there,
    ),
    ("a terminal", "31 97", a_terminal),
];

/// Everything that `ctr tasks` does with a container that runs.
fn a_life(host: &GpuHost, runtime: &str) -> Result<String> {
    let events = host.watch_events()?;
    let script = "trap 'echo bye >>/log; exit 7' TERM; while :; do sleep 0.1; done";
    let container = start(host, runtime, script)?;
    let mut seen = vec![container.status()?];
    let exec = |id: &str, options: &[&str], command: &[&str], stdin: &str| -> Result<String> {
        let argv = [&["tasks", "exec", "--exec-id", id], options, &["c"], command].concat();
        Ok(host.ctr(&argv, stdin)?.to_string())
    };
    let script = "echo out; echo err >&2; exit 5";
    seen.push(host.exec("c", "e1", &["sh", "-c", script])?.to_string());
    seen.push(exec(
        "e2",
        &[],
        &["sh", "-c", "read line; [ $line = this ]"],
        "this\n",
    )?);
    seen.push(exec("e3", &[], &["/nosuch"], "")?);
    seen.push(exec("e4", &["--detach"], &["sleep", "1000"], "")?);
    seen.push(exec("e4", &["--detach"], &["sleep", "1000"], "")?);
    seen.push(format!("{} processes have names", container.pids()?.len().min(2)));
    seen.push(
        host.ctr(
            &["tasks", "kill", "--exec-id", "e4", "--signal", "SIGKILL", "c"],
            "",
        )?
        .to_string(),
    );
    seen.push(host.ctr(&["tasks", "delete", "c"], "")?.to_string());
    container.task(&["pause"])?;
    seen.push(container.status()?);
    seen.push(exec("e5", &[], &["true"], "")?);
    seen.push(host.ctr(&["tasks", "pause", "c"], "")?.to_string());
    container.task(&["resume"])?;
    seen.push(container.status()?);
    seen.push(host.ctr(&["tasks", "resume", "c"], "")?.to_string());
    let metrics = container.task(&["metrics"])?;
    let names = metrics.lines().filter_map(|line| line.split_whitespace().next());
    seen.extend(names.map(str::to_owned));
    container.task(&["kill"])?;
    container.becomes("STOPPED")?;
    seen.push(exec("e6", &[], &["true"], "")?);
    seen.push(host.ctr(&["tasks", "kill", "c"], "")?.to_string());
    seen.push(format!("exit code {}", container.exit_code()?));
    container.forget()?;
    seen.push(events.until_exit("c")?);
    Ok(seen.join("\n"))
}

/// The bundle's files that define how the container is run.
fn a_bundle(host: &GpuHost, runtime: &str) -> Result<String> {
    let container = start(host, runtime, COUNT)?;
    let spec = host.node().read(format!("{BUNDLES}/c/config.json"))?;
    ensure!(
        !spec.contains("org.criu.config"),
        "an annotation was added:\n{spec}"
    );
    container.remove()?;
    Ok(spec)
}

fn a_lifecycle_is_as_with_the_stock_shim(platform: Platform) -> Result<()> {
    same(platform, "pl-l", "`tasks` of a container without a GPU", LIFE)
}

const LIFE: &[(&str, &str, Scenario)] = &[
    ("a life", "exit code 7", a_life),
    ("a bundle", "cgroupsPath", a_bundle),
];

/// Waits until the counting script has come `more` numbers further, none of them left out.
fn counts_on(container: &Container<'_>, host: &GpuHost, more: usize) -> Result<usize> {
    let path = host
        .node()
        .path(format!("{BUNDLES}/{}/rootfs/log", container.id()));
    let read = || std::fs::read_to_string(&path).unwrap_or_default().lines().count();
    let from = read();
    wait_for("the count to continue", LIMIT, || {
        Ok((read() >= from + more).then_some(()))
    })?;
    let text = std::fs::read_to_string(&path)?;
    let whole = &text[..text.rfind('\n').map_or(0, |end| end + 1)];
    for (line, number) in whole.lines().zip(1..) {
        ensure!(line == format!("{number}"), "{line} in place of {number}");
    }
    Ok(from)
}

/// `ctr containers checkpoint`, then a restore of the copy.
fn a_checkpoint(host: &GpuHost, runtime: &str) -> Result<String> {
    let container = start(host, runtime, COUNT)?;
    counts_on(&container, host, 3)?;
    container.checkpoint("checkpoint/c")?;
    counts_on(&container, host, 3)?;
    let mut seen = vec![container.status()?];
    container.remove()?;

    let (copy, _) = Container::restore(host, "c", "checkpoint/c", 0)?;
    let carried = counts_on(&copy, host, 3)?;
    ensure!(carried >= 3, "the copy started afresh");
    seen.push(copy.status()?);
    copy.task(&["kill", "--signal", "SIGKILL"])?;
    copy.becomes("STOPPED")?;
    seen.push(format!("exit code {}", copy.exit_code()?));
    copy.forget()?;
    host.remove_image("checkpoint/c")?;
    Ok(seen.join("\n"))
}

/// `ctr tasks checkpoint --exit` into a directory and into the content store, from which the container is
/// restored.
fn a_checkpoint_that_ends_it(host: &GpuHost, runtime: &str) -> Result<String> {
    let container = start(host, runtime, COUNT)?;
    counts_on(&container, host, 3)?;
    container.checkpoint_and_exit("/tmp/image")?;
    container.becomes("STOPPED")?;
    let mut seen = vec![format!("exit code {}", container.exit_code()?)];
    container.forget()?;
    let dir = host.node().path("/tmp/image");
    for file in ["inventory.img", "pstree.img", "descriptors.json", "firn.json"] {
        seen.push(format!("{file}: {}", dir.join(file).exists()));
    }
    std::fs::remove_dir_all(dir)?;

    let container = start(host, runtime, COUNT)?;
    counts_on(&container, host, 3)?;
    container.checkpoint_and_exit_to("checkpoint/c", runtime)?;
    container.becomes("STOPPED")?;
    container.remove()?;
    let (copy, _) = Container::restore(host, "c", "checkpoint/c", 0)?;
    counts_on(&copy, host, 3)?;
    copy.remove()?;
    host.remove_image("checkpoint/c")?;
    Ok(seen.join("\n"))
}

/// A runc that takes a moment to end after a dump.
const SLOW: &str = "#!/bin/sh\nrunc \"$@\"\ncode=$?\n\
                    case \"$*\" in *' checkpoint '*) sleep 2 ;; esac\nexit $code\n";

/// As the kubelet kills a container that has ended.
fn a_kill_after_a_dump_that_has_ended_it_costs_no_image(platform: Platform) -> Result<()> {
    on([GpuHost::for_test(platform, "wg-kill", &[])?], |[host]| {
        const WRAPPER: &str = "/usr/local/bin/slow-runc";
        host.node().write(WRAPPER, SLOW)?;
        host.node().run(&["chmod", "+x", WRAPPER])?;
        let options = ["--runtime", host.runtime_for_options()?, "--runc-binary", WRAPPER];
        let container = Container::run(host, "c", &options, &["sh", "-c", COUNT])?;
        counts_on(&container, host, 3)?;
        std::thread::scope(|scope| {
            let checkpoint = scope.spawn(|| container.checkpoint_and_exit("/tmp/image"));
            container.becomes("STOPPED")?;
            // It may be answered that it has ended.
            let _ended = container.task(&["kill", "--signal", "SIGKILL"]);
            checkpoint.join().expect("nothing panics")
        })?;
        let image = host.node().path("/tmp/image/pstree.img");
        ensure!(image.exists(), "there is no image");
        container.forget()?;
        host.idle()
    })
}

/// A dump that CRIU refuses: the container continues.
fn a_checkpoint_that_fails(host: &GpuHost, runtime: &str) -> Result<String> {
    let options = ["--runtime", runtime, "--device", "/dev/loop-control"];
    let script = format!("exec 3</dev/loop-control; {COUNT}");
    let container = Container::run(host, "c", &options, &["sh", "-c", &script])?;
    counts_on(&container, host, 3)?;
    let output = host
        .ctr(
            &["containers", "checkpoint", "--rw", "--task", "c", "checkpoint/c"],
            "",
        )?
        .to_string();
    let mut seen = vec![
        container.status()?,
        format!("image: {}", host.has_image("checkpoint/c")?),
    ];
    counts_on(&container, host, 3)?;
    container.remove()?;
    // Behind the name of the log firn quotes it.
    let (shown, reason) = output.split_once("criu-dump.log").unwrap_or((&output, ""));
    ensure!(runtime != FIRN || reason.starts_with("; (criu/"), "{output}");
    seen.push(shown.to_owned());
    Ok(seen.join("\n"))
}

const CHECKPOINTS: &[(&str, &str, Scenario)] = &[
    ("a checkpoint", "exit code 137", a_checkpoint),
    (
        "a checkpoint that fails",
        "RUNNING\nimage: false",
        a_checkpoint_that_fails,
    ),
    (
        "a checkpoint that ends it",
        "exit code 137\ninventory.img: true",
        a_checkpoint_that_ends_it,
    ),
];

fn checkpoints_are_as_with_the_stock_shim(platform: Platform) -> Result<()> {
    same(
        platform,
        "pl-c",
        "checkpoint and restore without a GPU",
        CHECKPOINTS,
    )
}

/// An image of one runtime is restored by the other.
fn either_shim_restores_the_others_image(platform: Platform) -> Result<()> {
    let host = GpuHost::for_test(platform, "pl-x", &[SimGpu::h200(1)])?;
    on([host], |[host]| {
        for (from, to) in [(STOCK, FIRN), (FIRN, STOCK)] {
            let container = start(host, from, COUNT)?;
            counts_on(&container, host, 3)?;
            container.checkpoint("checkpoint/from")?;
            container.remove()?;
            let mut archive = Archive::export(host, "checkpoint/from")?;
            archive.describe(IMAGE, to);
            archive.import(host, "checkpoint/to")?;
            let (copy, _) = Container::restore(host, "c", "checkpoint/to", 0)?;
            let carried = counts_on(&copy, host, 3)?;
            ensure!(carried >= 3, "from {from} to {to}: the copy started afresh");
            copy.remove()?;
            host.remove_image("checkpoint/from")?;
            host.remove_image("checkpoint/to")?;
        }
        host.idle()
    })
}

/// A shell that starts one program after the other is hardly ever outside of vfork, where CRIU cannot stop
/// it. containerd's shim fails here: who asks the shim itself pauses nothing.
fn a_shell_that_starts_programs_is_checkpointed(platform: Platform) -> Result<()> {
    let host = GpuHost::for_test(platform, "pl-v", &[SimGpu::h200(1)])?;
    on([host], |[host]| {
        let script = "i=0; while :; do i=$((i+1)); /bin/true; echo $i >>/log; done";
        let shell = start(host, host.runtime_for_options()?, script)?;
        let task = Task::of(host, "c")?;
        for number in 0..8 {
            counts_on(&shell, host, 3)?;
            let ends = number == 7;
            let options = CheckpointOptions {
                exit: ends,
                ..CheckpointOptions::default()
            };
            let pending = task.checkpoint(&format!("/tmp/image/{number}"), &options)?;
            let reported = describe(&task.end(pending), |_| "done".to_owned());
            ensure!(reported == "done", "checkpoint {number}: {reported}");
            let status = if ends { "STOPPED" } else { "RUNNING" };
            shell.becomes(status)?;
        }
        shell.forget()?;
        host.idle()
    })
}

/// A lock is held in the copy, whatever the client asks for: who would start the work again finds that
/// somebody is at it.
fn file_locks_move(platform: Platform) -> Result<()> {
    let host = GpuHost::for_test(platform, "pl-k", &[SimGpu::h200(1)])?;
    on([host], |[host]| {
        let runtime = ["--runtime", host.runtime_for_options()?];
        for kind in ["flock", "record-lock", "open-file-lock"] {
            let command = ["objects", kind, "/lock", "/log"];
            let container = Container::run(host, "c", &runtime, &command)?;
            counts_on(&container, host, 3)?;
            let task = Task::of(host, "c")?;
            let pending = task.checkpoint("/tmp/image", &CheckpointOptions::default())?;
            let reported = describe(&task.end(pending), |_| "done".to_owned());
            ensure!(reported == "done", "{kind}, not asked for: {reported}");
            counts_on(&container, host, 3)?;
            container.checkpoint("checkpoint/c")?;
            container.remove()?;
            let (copy, _) = Container::restore(host, "c", "checkpoint/c", 0)?;
            let carried = counts_on(&copy, host, 3).with_context(|| format!("the copy's {kind}"))?;
            ensure!(carried >= 3, "the copy started afresh");
            copy.remove()?;
            host.remove_image("checkpoint/c")?;
            host.node().run(&["rm", "-r", "/tmp/image"])?;
        }
        host.idle()
    })
}

/// A CRIU configuration with which the image would be elsewhere ends no container.
fn a_dump_into_another_directory_is_refused(platform: Platform) -> Result<()> {
    const CONFIG: &str = "/etc/criu/runc.conf";
    let host = GpuHost::for_test(platform, "pl-i", &[SimGpu::h200(1)])?;
    on([host], |[host]| {
        let container = start(host, host.runtime_for_options()?, COUNT)?;
        counts_on(&container, host, 3)?;
        host.node().run(&["mkdir", "-p", "/etc/criu", "/srv/elsewhere"])?;
        for line in ["images-dir /srv/elsewhere", "lazy-pages"] {
            host.node().write(CONFIG, format!("{line}\n"))?;
            let exit = ["tasks", "checkpoint", "--exit", "--image-path", "/tmp/image", "c"];
            let output = host.ctr(&exit, "")?;
            ensure!(output.code != Some(0), "{line}: {output}");
            let refused = output.stderr.contains("FIRN-CRIU-CONFIG") && output.stderr.contains(line);
            ensure!(refused, "{line}: {output}");
            counts_on(&container, host, 3)?;
        }
        host.node().run(&["rm", CONFIG])?;
        container.remove()?;
        host.idle()
    })
}

/// ctr 1.7 sends options of another type to a runtime that is not called after runc.
fn options_of_older_clients_are_taken(platform: Platform) -> Result<()> {
    let host = GpuHost::for_test(platform, "pl-o", &[SimGpu::h200(1)])?;
    on([host], |[host]| {
        let options = ["--runtime", FIRN, "--no-pivot"];
        let container = Container::run(host, "c", &options, &["sh", "-c", COUNT])?;
        counts_on(&container, host, 3)?;
        container.remove()?;
        host.idle()
    })
}

pub(crate) fn suite() -> matrix::Suite {
    matrix::Suite::new(&cases! {
        runs_are_as_with_the_stock_shim [FORKY, TRIXIE];
        a_lifecycle_is_as_with_the_stock_shim [FORKY, FORKY_V2, TRIXIE];
        checkpoints_are_as_with_the_stock_shim [FORKY, FORKY_V2, TRIXIE];
        either_shim_restores_the_others_image [FORKY, TRIXIE];
        a_shell_that_starts_programs_is_checkpointed [FORKY, FORKY_V2, TRIXIE];
        file_locks_move [FORKY, TRIXIE];
        a_kill_after_a_dump_that_has_ended_it_costs_no_image [TRIXIE, TRIXIE_V2];
        a_dump_into_another_directory_is_refused [FORKY, TRIXIE];
        options_of_older_clients_are_taken [TRIXIE];
    })
}
