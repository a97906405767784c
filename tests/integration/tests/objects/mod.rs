//! Everyday objects that a process can hold: each moves, or is refused before anything is touched. A trial
//! makes the object, moves it and looks; the table of docs/guide/objects.md has what was seen. What is
//! refused is forced as well, where CRIU can be had without firn's rules: with a container without GPUs.
//!
//! Needs root.

pub(crate) mod logs;
mod random;
pub(crate) mod table;

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use firn_lab::{
    BUNDLES, COUNTER, Container, FIRN, FREE_HUGE_PAGES, GpuHost, HugePages, STOCK, SimGpu, cases, failure,
    matrix, nothing_left, on, saw_object,
};
use firn_node::{Platform, Suite, wait_for};
use rustix::io::Errno;
use rustix::net::sockopt::socket_passcred;
use rustix::net::{AddressFamily, SocketType};

use table::{BY_RULES, HUGE_PAGES, LOST, OTHER_NAME, Object, REFUSED, Refused, WATCHES, inet, movable};

/// The code of most objects.
const CODE: &str = "FIRN-OBJECT";

const IMAGE: &str = "checkpoint/c";

/// How long a container may take for the next lines of its log.
const LIMIT: Duration = Duration::from_secs(60);

/// What the workload `objects` writes when its object has gone.
const GONE: &str = "it is not there any more";

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

    /// A container in which each of these objects has a process and a log of its own.
    fn start_all<'h>(self, host: &'h GpuHost, objects: &[Object<'_>]) -> Result<Container<'h>> {
        self.run(host, objects, &logs::start(objects), " wait")
    }

    /// A container in which this script starts the processes of these objects, and which computes then;
    /// without a GPU it does what `idle` has.
    fn run<'h>(
        self,
        host: &'h GpuHost,
        objects: &[Object<'_>],
        script: &str,
        idle: &str,
    ) -> Result<Container<'h>> {
        let options: Vec<&str> = objects.iter().flat_map(|object| object.2).copied().collect();
        match self {
            Self::Plain => {
                let options = [&["--runtime", FIRN], &options[..]].concat();
                Container::run(host, "c", &options, &["sh", "-c", &format!("{script}{idle}")])
            }
            Self::Gpu => {
                let script = format!("{script} {COUNTER}");
                Container::script(host, "c", &["0"], 1, &options, &script)
            }
        }
    }

    /// The object is as it was made, and the container computes.
    fn goes_on(self, host: &GpuHost, container: &Container<'_>) -> Result<()> {
        if self == Self::Gpu {
            container.goes_on(3)?;
        }
        counts_on(host, container, "log", 0).map(drop)
    }

    /// As [`Self::goes_on`], for each of these objects. `beyond`: the numbers that they have reached before.
    /// Returns those that they have reached.
    fn all_go_on(
        self,
        host: &GpuHost,
        container: &Container<'_>,
        objects: &[Object<'_>],
        beyond: &[u64],
    ) -> Result<Vec<u64>> {
        if self == Self::Gpu {
            container.goes_on(3)?;
        }
        let beyond = beyond.iter().copied().chain(std::iter::repeat(0));
        let each = objects.iter().zip(beyond).map(|(object, beyond)| {
            let log = format!("log-{}", object.0);
            counts_on(host, container, &log, beyond).context(object.1.to_owned())
        });
        each.collect()
    }
}

/// Waits until a log of the workload has three lines more than `beyond`, which are numbers one after the
/// other from 1 on. Returns the last.
///
/// A copy's log begins with what ctr has copied before its checkpoint, which may lack the last numbers.
fn counts_on(host: &GpuHost, container: &Container<'_>, log: &str, beyond: u64) -> Result<u64> {
    let path = host
        .node()
        .path(format!("{BUNDLES}/{}/rootfs/{log}", container.id()));
    let read = || logs::numbers(&std::fs::read_to_string(&path).unwrap_or_default());
    let known = read()?.len();
    let numbers = wait_for("the log to grow", LIMIT, || {
        let numbers = read()?;
        let is_more = numbers.len() >= known + 3;
        Ok((is_more && numbers.last() > Some(&beyond)).then_some(numbers))
    })?;
    for pair in numbers[known..].windows(2) {
        ensure!(pair[1] == pair[0] + 1, "{} after {}", pair[1], pair[0]);
    }
    ensure!(numbers[known] > beyond, "it began afresh, at {}", numbers[known]);
    Ok(numbers[numbers.len() - 1])
}

fn host(platform: Platform, name: &str) -> Result<GpuHost> {
    GpuHost::for_test(platform, name, &[SimGpu::h200(1)])
}

/// All in one container, each with a process of its own.
fn objects_move(platform: Platform) -> Result<()> {
    on([host(platform, "ob-m")?], |[host]| {
        let objects = movable(platform.suite);
        for kind in KINDS {
            move_all(host, &objects, kind).with_context(|| kind.shown())?;
            for object in &objects {
                saw_object(object.1, kind.shown(), "moves")?;
            }
        }
        host.idle()
    })
}

fn move_all(host: &GpuHost, objects: &[Object<'_>], kind: Kind) -> Result<()> {
    let container = kind.start_all(host, objects)?;
    kind.all_go_on(host, &container, objects, &[])?;
    host.node().run(&["firn", "audit", "c"])?;
    // A copy that began afresh would have to come this far first.
    let before = kind.all_go_on(host, &container, objects, &[])?;
    container.checkpoint(IMAGE)?;
    kind.all_go_on(host, &container, objects, &before)
        .context("after the checkpoint")?;
    container.remove()?;
    let (copy, _) = Container::restore(host, "c", IMAGE, kind.counters())?;
    kind.all_go_on(host, &copy, objects, &before)
        .context("the copy")?;
    copy.remove()?;
    host.remove_image(IMAGE)
}

/// overlayfs opens no handle: firn lets CRIU look where it has found the name. Without a GPU CRIU looks in a
/// few directories alone, and where its configuration names more.
fn watched_files_are_found_by_their_names(platform: Platform) -> Result<()> {
    const CONFIGURATION: &str = "/etc/criu/runc.conf";
    on([host(platform, "ob-w")?], |[host]| {
        move_all(host, &WATCHES, Kind::Gpu)?;
        host.watch_runc()?;
        for object in WATCHES {
            saw_object(object.1, Kind::Gpu.shown(), "moves")?;
            let refused = (object, "a watch (inotify, fanotify)", "Can't dump that handle");
            expect_refusal(host, refused, CODE, Kind::Plain).with_context(|| object.1)?;
            saw_object(object.1, Kind::Plain.shown(), &outcome(CODE, Kind::Plain))?;
        }
        let scanned = WATCHES.map(|(kind, ..)| format!("irmap-scan-path /object-{kind}\n"));
        host.node().write(CONFIGURATION, scanned.concat())?;
        move_all(host, &WATCHES, Kind::Plain)?;
        host.node().run(&["rm", CONFIGURATION])?;
        host.idle()
    })
}

/// A restore is refused where the node has no page left for them.
fn huge_pages_move_where_the_node_has_some(platform: Platform) -> Result<()> {
    on([host(platform, "ob-h")?], |[host]| {
        let _pages = HugePages::add(4)?;
        let node = host.node();
        node.write("/srv/none", "0\n")?;
        host.watch_runc()?;
        for kind in KINDS {
            move_all(host, &HUGE_PAGES, kind).with_context(|| kind.shown())?;
            let container = kind.start_all(host, &HUGE_PAGES)?;
            kind.all_go_on(host, &container, &HUGE_PAGES, &[])?;
            container.checkpoint(IMAGE)?;
            container.remove()?;
            node.run(&["mount", "--bind", "/srv/none", FREE_HUGE_PAGES])?;
            let before = host.runc_calls("restore")?;
            let dry = failure(node.run(&["firn", "restore", IMAGE, "--dry-run"]))?;
            let output = failure(Container::restore(host, "c", IMAGE, kind.counters()))?;
            for output in [dry, output] {
                let shown = "FIRN-HUGE-PAGES: ";
                let counted = "2 huge pages of 2048 KiB, and this node has 0 to give";
                ensure!(output.contains(shown) && output.contains(counted), "{output}");
            }
            ensure!(host.runc_calls("restore")? == before, "runc was called");
            node.run(&["umount", FREE_HUGE_PAGES])?;
            node.run(&["ctr", "containers", "delete", "c"])?;
            nothing_left(host, "c")?;
            host.remove_image(IMAGE)?;
            for object in HUGE_PAGES {
                saw_object(object.1, kind.shown(), "moves")?;
            }
        }
        host.idle()
    })
}

fn objects_are_refused(platform: Platform) -> Result<()> {
    on([host(platform, "ob-r")?], |[host]| {
        host.watch_runc()?;
        let is_old = is_criu_too_old(platform.suite)?;
        let all = REFUSED.into_iter().map(|refused| (refused, CODE));
        for (refused, code) in all.chain(BY_RULES) {
            let object = refused.0;
            // Every socket of the internet is refused there.
            if is_old && object.0 == "connection" {
                continue;
            }
            for kind in KINDS {
                expect_refusal(host, refused, code, kind)
                    .with_context(|| format!("{} {}", object.1, kind.shown()))?;
                saw_object(object.1, kind.shown(), &outcome(code, kind))?;
            }
        }
        let (code, remap) = ("FIRN-DELETED-NAME", "Can't create link remap");
        expect_refusal(host, (OTHER_NAME, "/dev/shm", remap), code, Kind::Plain)?;
        saw_object(OTHER_NAME.1, Kind::Plain.shown(), &outcome(code, Kind::Plain))?;
        move_all(host, &[OTHER_NAME], Kind::Gpu)?;
        saw_object(OTHER_NAME.1, Kind::Gpu.shown(), "moves")?;
        host.idle()
    })
}

/// Whether a suite's CRIU asks sockets for what this kernel has for Unix alone.
fn is_criu_too_old(suite: Suite) -> Result<bool> {
    let udp = rustix::net::socket(AddressFamily::INET, SocketType::DGRAM, None)?;
    Ok(suite != Suite::Forky && socket_passcred(&udp) == Err(Errno::OPNOTSUPP))
}

/// Of a suite with CRIU 4.1: doctor, audit and checkpoint have what it cannot dump on a newer kernel. The
/// page has no row of it, which another machine's kernel would not confirm.
fn sockets_are_refused_where_criu_is_too_old(platform: Platform) -> Result<()> {
    on([host(platform, "ob-s")?], |[host]| {
        host.watch_runc()?;
        let is_old = is_criu_too_old(platform.suite)?;
        let shown = "sockets of TCP, UDP, raw IP or packets";
        let doctor = host.output_of(&["firn", "doctor"], "")?;
        ensure!(
            doctor.stdout.contains(&format!("cannot dump {shown}")) == is_old,
            "{doctor}"
        );
        for object in inet().filter(|_| is_old) {
            let refused = (
                object,
                "a socket of TCP, UDP, raw IP or packets",
                "Can't get 1:34 opt",
            );
            for kind in KINDS {
                expect_refusal(host, refused, CODE, kind)
                    .with_context(|| format!("{} {}", object.1, kind.shown()))?;
            }
        }
        host.idle()
    })
}

fn outcome(code: &str, kind: Kind) -> String {
    match kind {
        Kind::Plain => format!("CRIU refuses it, and the container continues; `firn audit` has {code}"),
        Kind::Gpu => format!("refused before anything is touched: {code}"),
    }
}

fn expect_refusal(host: &GpuHost, refused: Refused, code: &str, kind: Kind) -> Result<()> {
    let container = kind.start(host, refused.0)?;
    expect_refused(host, container, refused, code, kind)
}

fn expect_refused(
    host: &GpuHost,
    container: Container<'_>,
    (_, shown, of_criu): Refused,
    code: &str,
    kind: Kind,
) -> Result<()> {
    audit_refuses(host, code, shown)?;
    let (before, length) = (host.runc_calls("checkpoint")?, host.log_length()?);
    let output = failure(container.checkpoint(IMAGE))?;
    let calls = host.runc_calls("checkpoint")? - before;
    match kind {
        Kind::Gpu => {
            ensure!(output.contains(&format!("{code}:")), "{output}");
            expect_untouched(host, length, calls, &output, &[shown])?;
        }
        // What CRIU itself does.
        Kind::Plain => ensure!(calls == 1 && output.contains(of_criu), "{calls} calls: {output}"),
    }
    kind.goes_on(host, &container)?;
    container.remove()
}

/// Whether the checkpoint was refused before the driver or runc were called, with one of these words.
fn expect_untouched(host: &GpuHost, length: usize, calls: usize, output: &str, words: &[&str]) -> Result<()> {
    ensure!(words.iter().any(|word| output.contains(word)), "{output}");
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

/// CRIU reads the mounts of a container from its first process, which sees none in a chroot.
fn a_chroot_of_the_first_process_is_refused(platform: Platform) -> Result<()> {
    const OBJECT: Object<'_> = ("chroot", "root of its own (chroot), of a child", &[]);
    const FIRST: &str = "root of its own (chroot), of the first process";
    on([host(platform, "ob-c")?], |[host]| {
        host.watch_runc()?;
        for kind in KINDS {
            let container = match kind {
                Kind::Plain => kind.start(host, OBJECT)?,
                Kind::Gpu => {
                    let script = format!("{COUNTER} & exec objects chroot /object /log");
                    let container = Container::script(host, "c", &["0"], 1, &[], &script)?;
                    kind.goes_on(host, &container)?;
                    container
                }
            };
            let shown = "a root directory other than the container's";
            expect_refused(host, container, (OBJECT, shown, "mountinfo"), CODE, kind)?;
            saw_object(FIRST, kind.shown(), &outcome(CODE, kind))?;
        }
        move_all(host, &[OBJECT], Kind::Gpu)?;
        saw_object(OBJECT.1, Kind::Gpu.shown(), "moves")?;
        host.idle()
    })
}

/// Nothing fails for them, and the copy runs without them.
fn settings_are_lost_and_the_audit_names_them(platform: Platform) -> Result<()> {
    on([host(platform, "ob-l")?], |[host]| {
        for kind in KINDS {
            lose_all(host, kind).with_context(|| kind.shown())?;
            for (object, shown) in LOST {
                let outcome = match shown {
                    Some(_) => "a copy has it no more; `firn audit` names it",
                    None => "a copy has it no more; it cannot be seen from outside",
                };
                saw_object(object.1, kind.shown(), outcome)?;
            }
        }
        host.idle()
    })
}

fn lose_all(host: &GpuHost, kind: Kind) -> Result<()> {
    let objects = LOST.map(|(object, _)| object);
    let container = kind.start_all(host, &objects)?;
    kind.all_go_on(host, &container, &objects, &[])?;
    let audit = host.node().run(&["firn", "audit", "c"])?.stdout;
    for shown in LOST.iter().filter_map(|(_, shown)| *shown) {
        ensure!(audit.contains(&format!("(objects): {shown}")), "{audit}");
    }
    container.checkpoint(IMAGE)?;
    kind.all_go_on(host, &container, &objects, &[])
        .context("after the checkpoint")?;
    container.remove()?;
    let (copy, _) = Container::restore(host, "c", IMAGE, kind.counters())?;
    for (kind, name, _) in objects {
        wait_for("the copy to miss it", LIMIT, || {
            let last = copy.exec(&["tail", "-n", "1", &format!("/log-{kind}")])?;
            Ok(last.contains(GONE).then_some(()))
        })
        .with_context(|| name)?;
    }
    copy.remove()?;
    host.remove_image(IMAGE)
}

/// CRIU makes a ping socket again, and does not connect it: nothing shows that but the copy.
fn a_connected_ping_socket_is_refused(platform: Platform) -> Result<()> {
    const PING: Object<'_> = ("ping", "ping socket, connected", &["--net-host"]);
    on([host(platform, "ob-p")?], |[host]| {
        host.node()
            .run(&["sh", "-c", "echo 0 0 >/proc/sys/net/ipv4/ping_group_range"])?;
        host.watch_runc()?;
        let container = Kind::Gpu.start(host, PING)?;
        audit_refuses(host, CODE, "a connected ping socket")?;
        let length = host.log_length()?;
        let output = failure(container.checkpoint(IMAGE))?;
        let calls = host.runc_calls("checkpoint")?;
        expect_untouched(host, length, calls, &output, &["a connected ping socket"])?;
        Kind::Gpu.goes_on(host, &container)?;
        container.remove()?;
        saw_object(PING.1, Kind::Gpu.shown(), &outcome(CODE, Kind::Gpu))?;

        let container = Kind::Plain.start(host, PING)?;
        audit_refuses(host, CODE, "a connected ping socket")?;
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
        counts_on(host, &container, "log", 0)?;
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
        watched_files_are_found_by_their_names [FORKY, TRIXIE];
        huge_pages_move_where_the_node_has_some [FORKY, TRIXIE];
        objects_are_refused [FORKY, TRIXIE];
        sockets_are_refused_where_criu_is_too_old [FORKY, TRIXIE];
        settings_are_lost_and_the_audit_names_them [FORKY, TRIXIE];
        a_chroot_of_the_first_process_is_refused [FORKY, TRIXIE];
        a_connected_ping_socket_is_refused [FORKY];
        a_user_namespace_is_refused [FORKY, TRIXIE];
        a_read_only_root_stays_so [FORKY, TRIXIE];
        random::the_audit_of_random_containers_is_right [FORKY, TRIXIE];
    })
}
