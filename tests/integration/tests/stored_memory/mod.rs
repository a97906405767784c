//! Memory that firn copies next to CRIU: into the node's store, or into the image without its zero pages.

mod bare;
mod copies;
mod delta;
mod encrypted;
mod events;
mod looks;
mod named;
mod progress;
mod rescued;
mod roots;
mod together;
mod unmounted;
mod whole;
mod words;

use std::process::Command;
use std::thread;

use anyhow::{Context, Result, bail, ensure};
use firn_lab::{Container, GpuHost, SimGpu, cases, failure, matrix, nothing_left, on};
use firn_node::Platform;

use bare::criu_alone_restores_what_firn_copied;
use copies::{an_exported_image_needs_no_store, an_imported_image_has_its_memory_in_the_store};
use delta::a_second_checkpoint_writes_what_has_changed;
use encrypted::an_encrypted_store_needs_its_key;
use events::containerd_shows_the_phases;
use looks::what_depends_on_the_store_shows_it;
use named::gc_keeps_the_memory_of_a_named_checkpoint;
use progress::{a_copy_that_takes_long_is_shown, a_dump_that_fails_ends_the_copy};
use rescued::gc_keeps_the_memory_of_a_rescued_image;
use roots::gc_removes_nothing_while_checkpoints_are_not_mounted;
use together::two_checkpoints_and_gc_share_a_store;
use unmounted::a_store_that_is_not_mounted_is_not_made_again;
use whole::a_file_has_all_memory;
use words::shared_memory_keeps_every_word;

/// Large memory goes into a store.
const STORE: &str = "[images]\nstore = \"/srv/store\"\nbulk = \"store\"\n";

/// GPU memory of a counter in MiB, and with what an image may have in addition.
const MIB: u64 = 200;
const REST: u64 = 40;

fn host(platform: Platform, name: &str, gpu: u32) -> Result<GpuHost> {
    GpuHost::for_test(platform, name, &[SimGpu::h200(gpu)])
}

fn job<'h>(host: &'h GpuHost, options: &[&str]) -> Result<Container<'h>> {
    let mib = MIB.to_string();
    let job = Container::count_with(host, "job", &["0"], 1, options, &["--mib", &mib])?;
    job.goes_on(3)?;
    Ok(job)
}

/// Size of a directory in MiB.
fn size(host: &GpuHost, path: &str) -> Result<u64> {
    let printed = host.node().run(&["du", "-sm", path])?.stdout;
    printed
        .split_whitespace()
        .next()
        .context("nothing is printed")?
        .parse()
        .context("no size")
}

/// Size of containerd's content in MiB.
fn content(host: &GpuHost) -> Result<u64> {
    size(host, "/var/lib/containerd/io.containerd.content.v1.content")
}

/// A job with large memory in the store of `host`, which has ended.
fn image(host: &GpuHost) -> Result<()> {
    host.configure(STORE)?;
    let job = job(host, &[])?;
    job.checkpoint("checkpoint/job")?;
    job.goes_on(3)?;
    job.remove()?;
    host.idle()
}

/// The image restores and the counter continues.
fn restores(host: &GpuHost) -> Result<()> {
    let (copy, _) = Container::restore(host, "job", "checkpoint/job", 1)?;
    copy.goes_on(3)?;
    copy.remove()?;
    host.idle()
}

/// The restore is refused with this code, and nothing is left.
fn expect_refused(host: &GpuHost, code: &str) -> Result<()> {
    let output = failure(Container::restore(host, "job", "checkpoint/job", 1).map(drop))?;
    ensure!(output.contains(&format!("{code}:")), "not {code} but:\n{output}");
    ensure!(output.contains("hint: "), "no hint in:\n{output}");
    // The task is there when it failed at its start, and not when it failed before.
    let _ = host.node().run(&["ctr", "tasks", "delete", "--force", "job"]);
    host.node().run(&["ctr", "containers", "delete", "job"])?;
    nothing_left(host, "job")?;
    host.idle()
}

fn large_memory_goes_into_the_store_and_comes_back(platform: Platform) -> Result<()> {
    on(
        [host(platform, "sm-a", 1)?, host(platform, "sm-b", 1)?],
        |[a, b]| {
            let before = content(a)?;
            image(a)?;
            let image = content(a)? - before;
            ensure!(image < REST, "the image has {image} MiB");
            let stored = size(a, "/srv/store")?;
            ensure!((MIB..MIB + REST).contains(&stored), "the store has {stored} MiB");
            restores(a)?;

            // Elsewhere the store is copied, or missed.
            a.send_image("checkpoint/job", b)?;
            expect_refused(b, "FIRN-STORE-MISSING")?;
            b.configure(STORE)?;
            expect_refused(b, "FIRN-STORE-UNUSABLE")?;
            send_store(a, b)?;
            restores(b)
        },
    )
}

fn send_store(from: &GpuHost, to: &GpuHost) -> Result<()> {
    let copied = Command::new("cp")
        .arg("-a")
        .arg(from.node().path("/srv/store"))
        .arg(to.node().path("/srv/"))
        .status()?;
    ensure!(copied.success(), "cannot copy the store");
    Ok(())
}

/// Names of the extents in the store.
fn extents(host: &GpuHost) -> Result<Vec<String>> {
    let found = host
        .node()
        .run(&["find", "/srv/store/extents", "-type", "f"])?
        .stdout;
    Ok(found.lines().map(str::to_owned).collect())
}

/// Whoever damages the store gets an error, at Create where a look shows it, and before the driver sees
/// anything where only the content does.
fn a_damaged_store_is_found(platform: Platform) -> Result<()> {
    on([host(platform, "sm-damaged", 1)?], |[host]| {
        image(host)?;
        let node = host.node();
        let all = extents(host)?;
        let (one, other) = (&all[0], &all[all.len() / 2]);
        node.run(&["cp", one, "/srv/kept"])?;
        let damages: [(&str, String); 4] = [
            ("FIRN-STORE-MISSING", format!("rm {one}")),
            ("FIRN-STORE-MISSING", format!("truncate -s 1M {one}")),
            (
                "FIRN-STORE-DAMAGED",
                format!("printf x | dd of={one} bs=1 seek=1000000 conv=notrunc status=none"),
            ),
            ("FIRN-STORE-DAMAGED", format!("cp {other} {one}")),
        ];
        for (code, damage) in damages {
            node.run(&["sh", "-c", &damage])?;
            expect_refused(host, code).context(damage)?;
            node.run(&["cp", "/srv/kept", one])?;
        }
        restores(host)
    })
}

/// What the store had of an earlier checkpoint is believed by its size, and not if the container is to end.
fn no_container_ends_on_a_damaged_store(platform: Platform) -> Result<()> {
    on([host(platform, "sm-exit", 1)?], |[host]| {
        host.configure(STORE)?;
        let fixed = MIB.to_string();
        let job = Container::count(host, "job", &["0"], 1, &["--fixed-mib", &fixed])?;
        job.goes_on(3)?;
        job.checkpoint("checkpoint/early")?;
        // All of them: memory that changes is not reused by the next checkpoint.
        let all = extents(host)?.join(" ");
        let node = host.node();
        let damage = format!(
            "mkdir /srv/kept; for f in {all}; do cp -p $f /srv/kept; \
             printf x | dd of=$f bs=1 seek=1000000 conv=notrunc status=none; done"
        );
        node.run(&["sh", "-euc", &damage])?;
        for place in ["checkpoint/last", "/root/last"] {
            let failed = failure(node.run(&["firn", "checkpoint", "--exit", "job", place]))?;
            ensure!(failed.contains("FIRN-STORE-DAMAGED"), "{place}: {failed}");
            job.goes_on(3).context(place)?;
        }
        let back = format!("for f in {all}; do cp -p /srv/kept/${{f##*/}} $f; done");
        node.run(&["sh", "-euc", &back])?;
        // The store has left the configuration since the shim read it.
        for place in ["checkpoint/last", "/root/last"] {
            let to = ["firn", "checkpoint", "--exit", "job", place];
            let failed = failure(node.run(&[&["env", "FIRN_CONFIG=/dev/null"], &to[..]].concat()))?;
            ensure!(failed.contains("FIRN-STORE-MISSING"), "{place}: {failed}");
            job.goes_on(3).context(place)?;
        }
        node.run(&["firn", "checkpoint", "--exit", "job", "checkpoint/last"])?;
        job.remove()?;
        let (copy, _) = Container::restore(host, "job", "checkpoint/last", 1)?;
        copy.goes_on(3)?;
        copy.remove()?;
        host.idle()
    })
}

/// A store that gets full costs nothing; neither does a directory that is none.
fn a_full_store_costs_nothing(platform: Platform) -> Result<()> {
    on([host(platform, "sm-full", 1)?], |[host]| {
        let node = host.node();
        node.run(&["mkdir", "-p", "/srv/store"])?;
        node.run(&[
            "mount",
            "-t",
            "tmpfs",
            "-o",
            "size=100m,mode=700",
            "tmpfs",
            "/srv/store",
        ])?;
        host.configure(STORE)?;
        let job = job(host, &[])?;
        let fails = |code: &str| {
            let output = failure(job.checkpoint("checkpoint/job").map(drop));
            // Success is explained by what the shim has logged.
            let output = output.with_context(|| format!("instead of {code}:\n{}", host.log()))?;
            ensure!(output.contains(&format!("{code}:")), "not {code} but:\n{output}");
            job.goes_on(3).map(drop)
        };
        fails("FIRN-STORE-FULL")?;
        node.run(&["mount", "-o", "remount,size=1g", "/srv/store"])?;
        host.configure(&format!("{STORE}store-cap = \"100MiB\"\n"))?;
        fails("FIRN-STORE-FULL")?;
        ensure!(extents(host)?.is_empty(), "something is left in the store");
        node.run(&["chmod", "755", "/srv/store"])?;
        host.configure(STORE)?;
        fails("FIRN-STORE-UNUSABLE")?;
        node.run(&["chmod", "700", "/srv/store"])?;
        job.checkpoint("checkpoint/job")?;
        job.remove()?;
        restores(host)
    })
}

/// Children, and memory that they share, of which CRIU numbers the files among those of processes.
fn a_family_that_shares_memory_moves_too(platform: Platform) -> Result<()> {
    on([host(platform, "sm-family", 1)?], |[host]| {
        host.configure(STORE)?;
        let habits = [
            "--forks",
            "idle,grandchild,orphan,zombie,threads,init",
            "--pool=4",
            "--server=2",
            "--mib=40",
        ];
        let job = Container::count(host, "job", &["0"], 1, &habits)?;
        job.goes_on(3)?;
        job.checkpoint("checkpoint/job")?;
        job.goes_on(3)?;
        job.remove()?;
        ensure!(!extents(host)?.is_empty(), "nothing is in the store");
        let (copy, _) = Container::restore(host, "job", "checkpoint/job", 1)?;
        copy.goes_on(3)?;
        // The copy can be checkpointed as its source.
        copy.checkpoint("checkpoint/again")?;
        copy.remove()?;
        host.idle()
    })
}

/// firn copies memory into the image as CRIU does, with less zeros; what it cannot copy CRIU copies.
fn the_image_gets_memory_by_firn(platform: Platform) -> Result<()> {
    on([host(platform, "sm-inline", 1)?], |[host]| {
        let inline = "[images]\ninline-copy = \"firn\"\n";
        host.configure(inline)?;
        let job = job(host, &[])?;
        let before = content(host)?;
        job.checkpoint("checkpoint/job")?;
        let image = content(host)? - before;
        ensure!((MIB..MIB + REST).contains(&image), "the image has {image} MiB");
        job.remove()?;
        restores(host)?;
        let log = host.log_since(0)?;
        ensure!(!log.contains("CRIU copies all memory"), "CRIU has copied");
        host.idle()
    })
}

fn what_firn_cannot_copy_criu_copies(platform: Platform) -> Result<()> {
    on([host(platform, "sm-odd", 1)?], |[host]| {
        host.configure(STORE)?;
        let odd = ["--memory-file-mib=20", "--mib=40"];
        let job = Container::count(host, "job", &["0"], 1, &odd)?;
        job.goes_on(3)?;
        job.checkpoint("checkpoint/job")?;
        job.goes_on(3)?;
        job.remove()?;
        let log = host.log_since(0)?;
        ensure!(
            log.contains("CRIU copies all memory of job into the image: "),
            "{log}"
        );
        // Nothing of it needs the store.
        host.node().run(&["rm", "-rf", "/srv/store"])?;
        restores(host)
    })
}

/// Copies of one image begin at once: each has its own memory, and the store what it had.
fn four_copies_begin_at_once(platform: Platform) -> Result<()> {
    on([host(platform, "sm-copies", 1)?], |[host]| {
        image(host)?;
        let stored = extents(host)?;
        let host: &GpuHost = host;
        let copies = thread::scope(|scope| -> Result<Vec<Container<'_>>> {
            let restore = |number| {
                let id = format!("copy-{number}");
                scope.spawn(move || Container::restore(host, &id, "checkpoint/job", 1))
            };
            let begun: Vec<_> = (0..4).map(restore).collect();
            let ended = begun.into_iter().map(|copy| match copy.join() {
                Ok(copy) => Ok(copy?.0),
                Err(_) => bail!("a restore panicked"),
            });
            ended.collect()
        })?;
        for copy in &copies {
            copy.goes_on(3)?;
        }
        for copy in copies {
            copy.remove()?;
        }
        ensure!(extents(host)? == stored, "the store has changed");
        host.idle()
    })
}

/// What an annotation chooses, where the operator allows it.
fn an_annotation_chooses_where_memory_goes(platform: Platform) -> Result<()> {
    on([host(platform, "sm-chosen", 1)?], |[host]| {
        let store = "[images]\nstore = \"/srv/store\"\n";
        for (configured, annotation, goes) in [
            ("", "store", true),
            ("bulk = \"store\"\n", "inline", false),
            ("allow-bulk = false\n", "store", false),
        ] {
            host.configure(&format!("{store}{configured}"))?;
            let annotation = format!("firn.dev/bulk={annotation}");
            let job = job(host, &["--annotation", &annotation])?;
            job.checkpoint("checkpoint/job")?;
            job.remove()?;
            let stored = host
                .node()
                .run(&["sh", "-c", "ls -A /srv/store/images 2>/dev/null || true"])?;
            let is_stored = !stored.stdout.trim().is_empty();
            ensure!(is_stored == goes, "{configured}{annotation}: stored: {is_stored}");
            restores(host)?;
            host.node().run(&["rm", "-rf", "/srv/store"])?;
            host.node().run(&["ctr", "images", "delete", "checkpoint/job"])?;
        }
        host.configure(store)?;
        let job = job(host, &["--annotation", "firn.dev/bulk=both"])?;
        let output = failure(job.checkpoint("checkpoint/job").map(drop))?;
        ensure!(output.contains("FIRN-STORE-UNUSABLE:"), "{output}");
        job.goes_on(3)?;
        job.remove()?;
        host.idle()
    })
}

pub(crate) fn suite() -> matrix::Suite {
    matrix::Suite::new(&cases! {
        large_memory_goes_into_the_store_and_comes_back [FORKY, FORKY_V2, TRIXIE];
        no_container_ends_on_a_damaged_store [FORKY_V2];
        a_damaged_store_is_found [FORKY];
        a_full_store_costs_nothing [FORKY, FORKY_V2];
        a_family_that_shares_memory_moves_too [FORKY, TRIXIE];
        shared_memory_keeps_every_word [FORKY, TRIXIE];
        the_image_gets_memory_by_firn [FORKY_V2, TRIXIE];
        what_firn_cannot_copy_criu_copies [FORKY, TRIXIE];
        four_copies_begin_at_once [FORKY_V2, TRIXIE];
        an_annotation_chooses_where_memory_goes [FORKY];
        an_exported_image_needs_no_store [FORKY, TRIXIE];
        an_imported_image_has_its_memory_in_the_store [FORKY];
        a_copy_that_takes_long_is_shown [FORKY];
        a_dump_that_fails_ends_the_copy [FORKY];
        containerd_shows_the_phases [FORKY, TRIXIE];
        a_second_checkpoint_writes_what_has_changed [FORKY];
        two_checkpoints_and_gc_share_a_store [FORKY];
        criu_alone_restores_what_firn_copied [FORKY, TRIXIE];
        a_store_that_is_not_mounted_is_not_made_again [FORKY];
        an_encrypted_store_needs_its_key [FORKY];
        gc_keeps_the_memory_of_a_rescued_image [FORKY, TRIXIE];
        gc_keeps_the_memory_of_a_named_checkpoint [FORKY, TRIXIE];
        gc_removes_nothing_while_checkpoints_are_not_mounted [FORKY];
        a_file_has_all_memory [FORKY];
        what_depends_on_the_store_shows_it [FORKY];
    })
}
