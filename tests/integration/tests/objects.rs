//! Everyday objects that a process can hold: each moves, or is refused before anything is touched. A trial
//! makes the object, moves it and looks; the table of docs/guide/objects.md has what was seen. What is
//! refused is forced as well, where CRIU can be had without firn's rules: with a container without GPUs.
//!
//! Needs root.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use firn_lab::{
    BUNDLES, COUNTER, Container, FIRN, GpuHost, STOCK, SimGpu, cases, failure, matrix, on, saw_object,
};
use firn_node::{Platform, wait_for};

const IMAGE: &str = "checkpoint/c";

/// How long a container may take for the next lines of its log.
const LIMIT: Duration = Duration::from_secs(60);

/// What the workload `objects` writes when its object has gone.
const GONE: &str = "it is not there any more";

/// A kind of the workload `objects`, its name on the page, and options of its container.
type Object<'a> = (&'static str, &'static str, &'a [&'a str]);

const MOVES: [Object<'_>; 14] = [
    ("flock", "lock of a file: flock", &[]),
    ("record-lock", "lock of a file: fcntl, of the process", &[]),
    ("open-file-lock", "lock of a file: fcntl, of the open file", &[]),
    (
        "timer",
        "timerfd, periodic, whose interval is shorter than the standstill",
        &[],
    ),
    ("event", "eventfd", &[]),
    ("signal", "signalfd, with a pending signal", &[]),
    ("pipe", "pipe, with unread bytes", &[]),
    ("pair", "Unix socket, connected inside, with unread bytes", &[]),
    ("memfd", "memfd", &[]),
    ("deleted", "file without a name", &[]),
    ("udp", "UDP socket", &[]),
    ("listener", "TCP socket that listens", &[]),
    ("pidfd", "pidfd of a process of the container", &[]),
    ("mount-namespace", "mount namespace of a process", SYS_ADMIN),
];

/// An object that is refused, how firn calls it, and what CRIU has in its log.
type Refused = (Object<'static>, &'static str, &'static str);

const REFUSED: [Refused; 13] = [
    (
        ("uts-namespace", "UTS namespace of a process", SYS_ADMIN),
        "a UTS namespace",
        "Can't dump nested uts namespace",
    ),
    (
        ("ipc-namespace", "IPC namespace of a process", SYS_ADMIN),
        "an IPC namespace",
        "Can't dump nested ipc namespace",
    ),
    (
        ("user-namespace", "user namespace of a process", SYS_ADMIN),
        "a user namespace",
        "Can't dump nested user namespace",
    ),
    (
        ("pid-namespace", "PID namespace of a process", SYS_ADMIN),
        "a PID namespace",
        "Can't dump nested pid namespace",
    ),
    (
        ("bpf", "BPF map", SYS_ADMIN),
        "a BPF map",
        "(anon anon_inode:bpf-map)",
    ),
    (
        ("perf-event", "perf event", SYS_ADMIN),
        "a perf event",
        "(anon anon_inode:[perf_event])",
    ),
    (
        ("userfaultfd", "userfaultfd", PTRACE),
        "a userfaultfd",
        "(anon anon_inode:[userfaultfd])",
    ),
    (
        ("secret-memory", "memfd_secret", &[]),
        "secret memory",
        "path=/secretmem (deleted)",
    ),
    (
        ("seccomp-listener", "listener of seccomp notifications", &[]),
        "a listener of seccomp",
        "(anon anon_inode:seccomp notify)",
    ),
    (
        ("thread-pidfd", "pidfd of a thread", &[]),
        "a pidfd of a thread",
        "PIDFD_THREAD flag is currently not supported",
    ),
    (
        ("landlock-rules", "set of Landlock rules", &[]),
        "a set of Landlock rules",
        "(anon anon_inode:[landlock-ruleset])",
    ),
    (
        ("vsock", "vsock socket", &[]),
        "a vsock socket",
        "Unknown socket collected (family 40)",
    ),
    (
        ("mptcp", "Multipath TCP socket", &[]),
        "a Multipath TCP socket",
        "Unsupported proto 262",
    ),
];

const SYS_ADMIN: &[&str] = &["--cap-add", "CAP_SYS_ADMIN"];
const PTRACE: &[&str] = &["--cap-add", "CAP_SYS_PTRACE"];

/// Whether the container has a GPU, and a process that computes there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Plain,
    Gpu,
}

const KINDS: [Kind; 2] = [Kind::Plain, Kind::Gpu];

impl Kind {
    fn shown(self) -> &'static str {
        match self {
            Self::Plain => "without a GPU",
            Self::Gpu => "with a GPU",
        }
    }

    fn counters(self) -> usize {
        match self {
            Self::Plain => 0,
            Self::Gpu => 1,
        }
    }

    /// A container with this object, which counts.
    fn start<'h>(self, host: &'h GpuHost, (object, _, options): Object<'_>) -> Result<Container<'h>> {
        let container = match self {
            Self::Plain => {
                let options = [&["--runtime", FIRN], options].concat();
                Container::run(host, "c", &options, &["objects", object, "/object", "/log"])
            }
            Self::Gpu => {
                let script = format!("objects {object} /object /log & {COUNTER}");
                Container::script(host, "c", &["0"], 1, options, &script)
            }
        }?;
        self.goes_on(host, &container)?;
        Ok(container)
    }

    /// The object is as it was made, and the container computes. Returns the first number that was seen.
    fn goes_on(self, host: &GpuHost, container: &Container<'_>) -> Result<u64> {
        if self == Self::Gpu {
            container.goes_on(3)?;
        }
        counts_on(host, container)
    }
}

/// Waits for new lines of the workload's log, which are numbers one after the other. Returns the first.
fn counts_on(host: &GpuHost, container: &Container<'_>) -> Result<u64> {
    let path = host
        .node()
        .path(format!("{BUNDLES}/{}/rootfs/log", container.id()));
    let read = || std::fs::read_to_string(&path).unwrap_or_default();
    let known = read().lines().count();
    let new = wait_for("the log to grow", LIMIT, || {
        let text = read();
        let whole = &text[..text.rfind('\n').map_or(0, |end| end + 1)];
        let new: Vec<String> = whole.lines().skip(known).map(str::to_owned).collect();
        Ok((new.len() >= 3).then_some(new))
    })?;
    let first = new[0]
        .parse()
        .with_context(|| format!("{:?} is no number", new[0]))?;
    for (line, number) in new.iter().zip(first..) {
        ensure!(*line == format!("{number}"), "{line} in place of {number}");
    }
    Ok(first)
}

fn host(platform: Platform, name: &str) -> Result<GpuHost> {
    GpuHost::for_test(platform, name, &[SimGpu::h200(1)])
}

fn objects_move(platform: Platform) -> Result<()> {
    on([host(platform, "ob-m")?], |[host]| {
        // CRIU before 4.2 cannot dump such sockets on Linux 6.16 and newer.
        let is_fit =
            |object: &Object<'_>| platform == Platform::FORKY || !["udp", "listener"].contains(&object.0);
        for object in MOVES.into_iter().filter(is_fit) {
            for kind in KINDS {
                moves(host, object, kind).with_context(|| format!("{} {}", object.1, kind.shown()))?;
                saw_object(object.1, kind.shown(), "moves")?;
            }
        }
        host.idle()
    })
}

fn moves(host: &GpuHost, object: Object<'_>, kind: Kind) -> Result<()> {
    let container = kind.start(host, object)?;
    host.node().run(&["firn", "audit", "c"])?;
    // A copy that began afresh would have to come this far first.
    let before = counts_on(host, &container)?;
    container.checkpoint(IMAGE)?;
    kind.goes_on(host, &container).context("after the checkpoint")?;
    container.remove()?;
    let (copy, _) = Container::restore(host, "c", IMAGE, kind.counters())?;
    let first = counts_on(host, &copy).context("the copy")?;
    ensure!(first > before, "the copy started afresh");
    kind.goes_on(host, &copy).context("the copy")?;
    copy.remove()?;
    host.remove_image(IMAGE)
}

fn objects_are_refused(platform: Platform) -> Result<()> {
    on([host(platform, "ob-r")?], |[host]| {
        host.watch_runc()?;
        for refused in REFUSED {
            let object = refused.0;
            for kind in KINDS {
                expect_refusal(host, refused, kind)
                    .with_context(|| format!("{} {}", object.1, kind.shown()))?;
                saw_object(object.1, kind.shown(), outcome(kind))?;
            }
        }
        host.idle()
    })
}

fn outcome(kind: Kind) -> &'static str {
    match kind {
        Kind::Plain => "CRIU refuses it, and the container continues; `firn audit` has FIRN-OBJECT",
        Kind::Gpu => "refused before anything is touched: FIRN-OBJECT",
    }
}

fn expect_refusal(host: &GpuHost, (object, shown, of_criu): Refused, kind: Kind) -> Result<()> {
    let container = kind.start(host, object)?;
    audit_refuses(host, "FIRN-OBJECT", shown)?;
    let (before, length) = (host.runc_calls("checkpoint")?, host.log_length()?);
    let output = failure(container.checkpoint(IMAGE))?;
    let calls = host.runc_calls("checkpoint")? - before;
    match kind {
        Kind::Gpu => expect_untouched(host, length, calls, &output, shown)?,
        // What CRIU itself does.
        Kind::Plain => ensure!(calls == 1 && output.contains(of_criu), "{calls} calls: {output}"),
    }
    kind.goes_on(host, &container)?;
    container.remove()
}

/// Whether the checkpoint was refused for this object before the driver or runc were called.
fn expect_untouched(host: &GpuHost, length: usize, calls: usize, output: &str, shown: &str) -> Result<()> {
    ensure!(
        output.contains("FIRN-OBJECT:") && output.contains(shown),
        "{output}"
    );
    let log = host.log_since(length)?;
    ensure!(
        calls == 0 && !log.contains("phase=gpu-lock"),
        "{calls} calls: {log}"
    );
    Ok(())
}

fn audit_refuses(host: &GpuHost, code: &str, shown: &str) -> Result<()> {
    let audit = host.node().run(&["sh", "-c", "firn audit c; echo rc $?"])?.stdout;
    let is_refused = audit.contains(code) && audit.contains(shown) && audit.contains("rc 1");
    ensure!(is_refused, "{audit}");
    Ok(())
}

/// CRIU makes a ping socket again, and does not connect it: nothing shows that but the copy.
fn a_connected_ping_socket_is_refused(platform: Platform) -> Result<()> {
    const PING: Object<'_> = ("ping", "ping socket, connected", &["--net-host"]);
    on([host(platform, "ob-p")?], |[host]| {
        host.node()
            .run(&["sh", "-c", "echo 0 0 >/proc/sys/net/ipv4/ping_group_range"])?;
        host.watch_runc()?;
        let container = Kind::Gpu.start(host, PING)?;
        audit_refuses(host, "FIRN-OBJECT", "a connected ping socket")?;
        let length = host.log_length()?;
        let output = failure(container.checkpoint(IMAGE))?;
        let calls = host.runc_calls("checkpoint")?;
        expect_untouched(host, length, calls, &output, "a connected ping socket")?;
        Kind::Gpu.goes_on(host, &container)?;
        container.remove()?;
        saw_object(PING.1, Kind::Gpu.shown(), outcome(Kind::Gpu))?;

        let container = Kind::Plain.start(host, PING)?;
        audit_refuses(host, "FIRN-OBJECT", "a connected ping socket")?;
        container.checkpoint(IMAGE)?;
        container.remove()?;
        let (copy, _) = Container::restore(host, "c", IMAGE, 0)?;
        wait_for("the copy to miss its peer", LIMIT, || {
            Ok(copy
                .exec(&["tail", "-n", "1", "/log"])?
                .contains(GONE)
                .then_some(()))
        })?;
        copy.remove()?;
        let lost = "CRIU loses the peer; `firn audit` has FIRN-OBJECT";
        saw_object(PING.1, Kind::Plain.shown(), lost)?;
        host.remove_image(IMAGE)?;
        host.idle()
    })
}

/// The stock shim makes a checkpoint of such a container, which nothing can restore.
fn a_user_namespace_is_refused(platform: Platform) -> Result<()> {
    const SHOWN: &str = "user namespace of the container";
    on([host(platform, "ob-u")?], |[host]| {
        host.watch_runc()?;
        // ctr 1.7 does not find the layers of a map again once its container has gone.
        for (kind, map) in KINDS.into_iter().zip(["0:100000:65536", "0:200000:65536"]) {
            let options = ["--uidmap", map, "--gidmap", map, "--remap-labels"];
            let container = kind.start(host, ("event", SHOWN, &options))?;
            audit_refuses(host, "FIRN-USER-NAMESPACE", "the container has a user namespace")?;
            let output = failure(container.checkpoint(IMAGE))?;
            let calls = host.runc_calls("checkpoint")?;
            ensure!(
                output.contains("FIRN-USER-NAMESPACE:") && calls == 0,
                "{calls} calls: {output}"
            );
            kind.goes_on(host, &container)?;
            container.remove()?;
            let outcome = "refused before anything is touched: FIRN-USER-NAMESPACE";
            saw_object(SHOWN, kind.shown(), outcome)?;
        }
        // On trixie ctr does not get as far as CRIU.
        if platform != Platform::FORKY {
            return host.idle();
        }
        let map = "0:300000:65536";
        let options = [
            "--runtime",
            STOCK,
            "--uidmap",
            map,
            "--gidmap",
            map,
            "--remap-labels",
        ];
        let container = Container::run(host, "c", &options, &["objects", "event", "/object", "/log"])?;
        counts_on(host, &container)?;
        container.checkpoint(IMAGE)?;
        container.remove()?;
        let output = failure(Container::restore(host, "c", IMAGE, 0))?;
        ensure!(output.contains("criu failed"), "{output}");
        host.remove_image(IMAGE)
    })
}

/// CRIU 4.1 leaves the root writable.
fn a_read_only_root_stays_so(platform: Platform) -> Result<()> {
    const OPTIONS: [&str; 3] = ["--read-only", "--mount", "type=tmpfs,src=tmpfs,dst=/tmp"];
    on([host(platform, "ob-o")?], |[host]| {
        for kind in KINDS {
            let container = match kind {
                Kind::Plain => {
                    let options = [&["--runtime", FIRN], &OPTIONS[..]].concat();
                    Container::run(
                        host,
                        "c",
                        &options,
                        &["objects", "event", "/tmp/object", "/tmp/log"],
                    )
                }
                Kind::Gpu => {
                    let script = COUNTER.replace("/counter.log", "/tmp/log");
                    Container::script(host, "c", &["0"], 1, &OPTIONS, &script)
                }
            }?;
            is_read_only(&container)?;
            host.node().run(&["firn", "audit", "c"])?;
            container.checkpoint(IMAGE)?;
            is_read_only(&container)?;
            container.remove()?;
            let (copy, _) = Container::restore(host, "c", IMAGE, kind.counters())?;
            is_read_only(&copy).with_context(|| format!("the copy {}", kind.shown()))?;
            copy.remove()?;
            host.remove_image(IMAGE)?;
            saw_object("read-only root", kind.shown(), "moves")?;
        }
        host.idle()
    })
}

/// Its log grows, and nobody can write to its root.
fn is_read_only(container: &Container<'_>) -> Result<()> {
    let lines = || {
        let lines = container.exec(&["wc", "-l", "/tmp/log"])?;
        let count = lines
            .split_whitespace()
            .next()
            .and_then(|count| count.parse().ok());
        count.with_context(|| format!("{lines:?} is no count"))
    };
    wait_for("a log", LIMIT, || {
        Ok(container.exec(&["test", "-e", "/tmp/log"]).ok().map(drop))
    })?;
    let before: usize = lines()?;
    wait_for("the log to grow", LIMIT, || {
        Ok((lines()? > before + 3).then_some(()))
    })?;
    let written = container.exec(&["sh", "-c", "touch /x 2>&1 || true"])?;
    ensure!(written.contains("Read-only file system"), "{written:?}");
    Ok(())
}

pub(crate) fn suite() -> matrix::Suite {
    matrix::Suite::new(&cases! {
        objects_move [FORKY, TRIXIE];
        objects_are_refused [FORKY, TRIXIE];
        a_connected_ping_socket_is_refused [FORKY];
        a_user_namespace_is_refused [FORKY, TRIXIE];
        a_read_only_root_stays_so [FORKY, TRIXIE];
    })
}
