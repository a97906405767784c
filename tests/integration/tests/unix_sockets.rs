//! Unix sockets of a job that lead outside: refused and named, or closed in the copy, while the source keeps
//! them.
//!
//! The job and the node share a directory, /srv/agent on the node and /agent in the container, with the
//! addresses of servers. Sockets whose both ends are inside continue in every case.
//!
//! Needs root.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use firn_lab::{COUNTER, Container, FIRN, GpuHost, SimGpu, cases, failure, matrix, on};
use firn_node::{Platform, wait_for};

const SHARED: &str = "type=bind,src=/srv/agent,dst=/agent,options=rbind:rw";

/// A socket pair, and a server and its client inside.
const INSIDE: &str = "unix-talk pair none /pair &
    unix-talk serve /in.sock /dev/null &
    until [ -S /in.sock ]; do sleep 0.1; done
    unix-talk talk /in.sock /inside &";

const WAIT: Duration = Duration::from_secs(60);

fn host(platform: Platform, name: &str, gpu: u32) -> Result<GpuHost> {
    let host = GpuHost::for_test(platform, name, &[SimGpu::h200(gpu)])?;
    host.node().run(&["mkdir", "-p", "/srv/agent"])?;
    Ok(host)
}

fn job<'h>(host: &'h GpuHost, options: &[&str], script: &str) -> Result<Container<'h>> {
    let script = format!("{COUNTER} &\n{INSIDE}\n{script}\nwhile :; do sleep 1; done");
    let options = [&["--mount", SHARED][..], options].concat();
    let job = Container::script(host, "job", &["0"], 1, &options, &script)?;
    goes_on(&job)?;
    Ok(job)
}

/// The job computes, and its sockets inside are connected.
fn goes_on(job: &Container<'_>) -> Result<()> {
    job.goes_on(3)?;
    for file in ["/pair", "/inside"] {
        grows(file, || job.exec(&["cat", file]).unwrap_or_default())?;
    }
    Ok(())
}

/// Messages arrive.
fn grows(file: &str, read: impl Fn() -> String) -> Result<()> {
    let before = read().len();
    wait_for(&format!("{file} to grow"), WAIT, || {
        let now = read();
        ensure!(!now.contains("closed"), "{file}: {now}");
        Ok((now.len() > before + 4).then_some(()))
    })
}

fn talks_on(job: &Container<'_>) -> Result<()> {
    grows("/talk", || job.exec(&["cat", "/talk"]).unwrap_or_default())
}

fn node_sees_more(host: &GpuHost, file: &str) -> Result<()> {
    grows(file, || host.node().read(file).unwrap_or_default())
}

/// The socket of the copy was closed; returns what its process saw.
fn was_closed(job: &Container<'_>) -> Result<String> {
    wait_for("the copy to see its socket closed", WAIT, || {
        let talk = job.exec(&["cat", "/talk"])?;
        Ok(talk.contains("closed: ").then_some(talk))
    })
}

/// Starts a program of the node, and waits until a server has its address.
fn start(host: &GpuHost, arguments: &[&str], address: Option<&str>) -> Result<std::process::Child> {
    let node = host.node();
    let child = node.spawn(&[&["unix-talk"], arguments].concat())?;
    if let Some(address) = address {
        wait_for(address, WAIT, || {
            let is_there = node.run(&["test", "-S", address]).is_ok();
            Ok(is_there.then_some(()))
        })?;
    }
    Ok(child)
}

fn end(mut child: std::process::Child) -> Result<()> {
    child.kill().context("end a program of the node")?;
    child.wait().map(drop).context("wait for it")
}

/// It is refused, and the message has all of these parts.
fn expect_refused(host: &GpuHost, job: &Container<'_>, parts: &[&str]) -> Result<()> {
    let output = failure(job.checkpoint("checkpoint/job"))?;
    for part in parts {
        ensure!(output.contains(part), "no {part:?} in {output}");
    }
    ensure!(!host.runc_has("checkpoint")?, "runc was called");
    let audit = audit(host)?;
    ensure!(audit.contains("FIRN-UNIX"), "{audit}");
    Ok(())
}

fn audit(host: &GpuHost) -> Result<String> {
    Ok(host.firn_shows(&["audit", "job"])?.1.to_string())
}

fn auto(host: &GpuHost) -> Result<()> {
    host.configure("[checkpoint]\ntcp = \"auto\"\n")
}

fn a_client_of_a_server_outside_is_refused_by_name_or_closed_in_the_copy(platform: Platform) -> Result<()> {
    on(
        [host(platform, "unix-a", 1)?, host(platform, "unix-b", 2)?],
        |[a, b]| {
            a.watch_runc()?;
            let address = "/srv/agent/s.sock";
            let server = start(a, &["serve", address, "/dev/null"], Some(address))?;
            let clients = "unix-talk talk /agent/s.sock /talk & unix-talk late /agent/s.sock /late &";
            let source = job(a, &[], clients)?;
            talks_on(&source)?;
            let named = [
                "FIRN-UNIX:",
                "(unix-talk), descriptor ",
                ": stream from an unnamed socket to /srv/agent/s.sock",
            ];
            expect_refused(a, &source, &[&named[..], &["firn.dev/tcp=auto"]].concat())?;
            a.configure("[checkpoint]\ntcp = \"keep\"\n")?;
            expect_refused(a, &source, &[&named[..], &["instead of keep"]].concat())?;
            talks_on(&source)?;

            auto(a)?;
            let audit = audit(a)?;
            ensure!(audit.contains("in a copy 2 are closed (process "), "{audit}");
            source.checkpoint("checkpoint/job")?;
            goes_on(&source)?;
            talks_on(&source)?;
            a.send_image("checkpoint/job", b)?;
            source.remove()?;
            end(server)?;
            a.idle()?;

            let (copy, _) = Container::restore(b, "job", "checkpoint/job", 1)?;
            goes_on(&copy)?;
            let talk = was_closed(&copy)?;
            ensure!(talk.contains("end of file\nclosed: Broken pipe"), "{talk}");
            copy.exec(&["touch", "/go"])?;
            wait_for("what had arrived, and the end of the file", WAIT, || {
                let late = copy.exec(&["cat", "/late"])?;
                Ok((late == "x\nend of file\n").then_some(()))
            })
            .with_context(|| copy.exec(&["cat", "/late"]).unwrap_or_default())?;
            copy.checkpoints_again("checkpoint/job")?;
            goes_on(&copy)?;
            copy.remove()?;
            b.idle()
        },
    )
}

/// As a log daemon's /dev/log. In a network namespace of the container's own CRIU does not see the daemon.
/// The source continues once, and ends once.
fn a_datagram_socket_is_closed_in_the_copy_alone(platform: Platform) -> Result<()> {
    on([host(platform, "unix-log", 1)?], |[host]| {
        let address = "/srv/agent/log";
        let daemon = start(host, &["receive", address, "/tmp/got"], Some(address))?;
        let runtime = host.runtime_for_options()?;
        for (network, ends) in [(&[][..], false), (&["--net-host"], true)] {
            let options = ["--annotation", "firn.dev/tcp=auto", "--runtime", runtime];
            let options = [&options, network].concat();
            let source = job(host, &options, "unix-talk send /agent/log /talk &")?;
            talks_on(&source)?;
            if ends {
                source.checkpoint_and_exit_to("checkpoint/job", runtime)?;
                source.becomes("STOPPED")?;
            } else {
                source.checkpoint("checkpoint/job")?;
                goes_on(&source)?;
                talks_on(&source)?;
                node_sees_more(host, "/tmp/got")?;
            }
            source.remove()?;
            host.idle()?;
            let (copy, _) = Container::restore(host, "job", "checkpoint/job", 1)?;
            goes_on(&copy)?;
            let talk = was_closed(&copy).with_context(|| format!("{network:?}"))?;
            ensure!(talk.contains("not connected"), "{talk}");
            copy.remove()?;
            host.remove_image("checkpoint/job")?;
            host.idle()?;
        }
        end(daemon)
    })
}

/// The accepted end belongs to the network namespace of the client: without the node's network CRIU does not
/// see it.
fn a_client_outside_loses_its_server_in_the_copy_alone(platform: Platform) -> Result<()> {
    on(
        [host(platform, "unix-c", 1)?, host(platform, "unix-d", 2)?],
        |[a, b]| {
            let (address, client) = ("/srv/agent/in.sock", ["talk", "/srv/agent/in.sock", "/tmp/talk"]);
            for network in [&[][..], &["--net-host"]] {
                let options = [&["--annotation", "firn.dev/tcp=auto"], network].concat();
                let source = job(a, &options, "unix-talk serve /agent/in.sock /dev/null &")?;
                wait_for("the server", WAIT, || {
                    Ok(a.node().path(address).exists().then_some(()))
                })?;
                let outside = start(a, &client, None)?;
                node_sees_more(a, "/tmp/talk")?;
                source.checkpoint("checkpoint/job")?;
                goes_on(&source)?;
                node_sees_more(a, "/tmp/talk")?;
                a.send_image("checkpoint/job", b)?;
                source.remove()?;
                end(outside)?;
                a.idle()?;

                let (copy, _) = Container::restore(b, "job", "checkpoint/job", 1)?;
                goes_on(&copy)?;
                let outside = start(b, &client, None)?;
                node_sees_more(b, "/tmp/talk").with_context(|| format!("a new client, {network:?}"))?;
                copy.remove()?;
                end(outside)?;
                b.idle()?;
                for host in [&*a, &*b] {
                    host.remove_image("checkpoint/job")?;
                    host.node().run(&["rm", address, "/tmp/talk"])?;
                }
            }
            Ok(())
        },
    )
}

/// A server that is stopped accepts nobody, whatever the annotation asks for.
fn a_connection_that_is_not_accepted_is_refused_by_name(platform: Platform) -> Result<()> {
    on([host(platform, "unix-stop", 1)?], |[host]| {
        host.watch_runc()?;
        auto(host)?;
        let address = "/srv/agent/s.sock";
        let server = start(host, &["listen", address, "/dev/null"], Some(address))?;
        let job = job(host, &[], "unix-talk talk /agent/s.sock /talk &")?;
        let parts = [
            "FIRN-UNIX:",
            "to /srv/agent/s.sock, not accepted yet",
            "hook prepare",
        ];
        wait_for("the client", WAIT, || {
            Ok(audit(host)?.contains("not accepted yet").then_some(()))
        })?;
        expect_refused(host, &job, &parts)?;
        goes_on(&job)?;
        job.remove()?;
        end(server)?;
        host.idle()
    })
}

/// CRIU refuses the socket by itself, and leaves out the process of exec.
fn the_audit_knows_what_criu_does_without_a_gpu(platform: Platform) -> Result<()> {
    on([host(platform, "unix-plain", 1)?], |[host]| {
        let address = "/srv/agent/s.sock";
        let server = start(host, &["serve", address, "/dev/null"], Some(address))?;
        let options = ["--runtime", FIRN, "--mount", SHARED];
        let plain = |command: &[&str]| Container::run(host, "job", &options, command);
        let job = plain(&["unix-talk", "talk", "/agent/s.sock", "/talk"])?;
        talks_on(&job)?;
        let shown = audit(host)?;
        ensure!(
            shown.contains("FIRN-UNIX") && shown.contains("to /srv/agent/s.sock"),
            "{shown}"
        );
        let output = failure(job.checkpoint("checkpoint/job"))?;
        ensure!(output.contains("unix: "), "{output}");
        talks_on(&job)?;
        job.remove()?;

        let job = plain(&["sh", "-c", "while :; do sleep 1; done"])?;
        let exec = ["ctr", "tasks", "exec", "--exec-id", "other", "--detach", "job"];
        host.node().run(&[&exec[..], &["sleep", "2000"]].concat())?;
        wait_for("the process of exec", WAIT, || {
            let shown = audit(host)?;
            let is_named = shown.contains("a copy is without process ") && shown.contains("(sleep)");
            Ok(is_named.then_some(()))
        })?;
        job.checkpoint("checkpoint/job")?;
        job.remove()?;
        let (copy, _) = Container::restore(host, "job", "checkpoint/job", 0)?;
        let processes = copy.exec(&["ps", "-o", "args"])?;
        ensure!(
            processes.contains("while :") && !processes.contains("sleep 2000"),
            "{processes}"
        );
        copy.remove()?;
        host.remove_image("checkpoint/job")?;
        end(server)?;
        host.idle()
    })
}

pub(crate) fn suite() -> matrix::Suite {
    matrix::Suite::new(&cases! {
        a_client_of_a_server_outside_is_refused_by_name_or_closed_in_the_copy [FORKY, TRIXIE];
        a_datagram_socket_is_closed_in_the_copy_alone [FORKY, TRIXIE];
        a_client_outside_loses_its_server_in_the_copy_alone [FORKY, TRIXIE];
        a_connection_that_is_not_accepted_is_refused_by_name [FORKY];
        the_audit_knows_what_criu_does_without_a_gpu [FORKY, TRIXIE];
    })
}
