//! The annotations of examples/serving, against a server with the endpoints that each engine documents. The
//! engines themselves are not installed here.
//!
//! Needs root.

use anyhow::{Context, Result, ensure};
use firn_lab::{COUNTER, Container, GpuHost, SimGpu, cases, failure, matrix, on};
use firn_node::Platform;
use serde_json::Value;

/// An engine: its file, its port, the endpoints that release and take up memory, and whether these need a
/// body, with tags.
struct Engine {
    file: &'static str,
    text: &'static str,
    port: &'static str,
    release: &'static str,
    resume: &'static str,
    body: Option<&'static str>,
}

const ENGINES: [Engine; 3] = [
    Engine {
        file: "vllm.yaml",
        text: include_str!("../../../examples/serving/vllm.yaml"),
        port: "8000",
        release: "/sleep?level=1",
        resume: "/wake_up",
        body: None,
    },
    Engine {
        file: "sglang.yaml",
        text: include_str!("../../../examples/serving/sglang.yaml"),
        port: "30000",
        release: "/release_memory_occupation",
        resume: "/resume_memory_occupation",
        body: Some("{}"),
    },
    Engine {
        file: "tensorrt-llm.yaml",
        text: include_str!("../../../examples/serving/tensorrt-llm.yaml"),
        port: "8000",
        release: "/release_memory",
        resume: "/resume_memory",
        body: Some("{\"tags\": [\"kv_cache\"]}"),
    },
];

/// The stand-in: answers 200 to a right call, 405 to another method, 422 to another body where one is needed,
/// 404 to another path; notes the calls in /requests, and its state in /asleep. /broken makes it answer 500.
fn stand_in(engine: &Engine) -> String {
    let Engine {
        port,
        release,
        resume,
        body,
        ..
    } = engine;
    let check = match body {
        Some(body) => format!("test \"$body\" = '{body}' || status='422 No'"),
        None => ":".to_owned(),
    };
    format!(
        "cat >/serve <<'E'\n#!/bin/sh\nread -r method path version\n\
        while read -r header && test \"$header\" != \"$(printf '\\r')\"; do \
        case $header in *ength:*) n=$(echo ${{header#*:}} | tr -d '\\r ');; esac; done\n\
        body=$(head -c ${{n:-0}})\nstatus='200 OK'\n{check}\n\
        case $path in '{release}'|'{resume}') ;; *) status='404 No';; esac\n\
        test $method = POST || status='405 No'\ntest -e /broken && status='500 No'\n\
        echo \"$method $path $status\" >>/requests\n\
        case \"$status $path\" in '200 OK {release}') touch /asleep;; \
        '200 OK {resume}') rm -f /asleep;; esac\n\
        printf 'HTTP/1.1 %s\\r\\nContent-Length: 0\\r\\nConnection: close\\r\\n\\r\\n' \"$status\"\nE\n\
        chmod +x /serve\n{COUNTER} &\nnc -ll -p {port} -e /serve &\nwhile :; do sleep 0.2; done"
    )
}

/// The options of `ctr run` for the annotations of an example.
fn options(Engine { file, text, .. }: &Engine) -> Result<Vec<String>> {
    let mut options = Vec::new();
    for line in text.lines().map(str::trim) {
        if let Some((name, value)) = line
            .split_once(": ")
            .filter(|(name, _)| name.starts_with("firn.dev/"))
        {
            // A double-quoted scalar of YAML is a JSON string here.
            let value: String = serde_json::from_str(value).with_context(|| line.to_owned())?;
            options.extend(["--annotation".to_owned(), format!("{name}={value}")]);
        }
    }
    ensure!(options.len() == 10, "{file} has {options:?}");
    Ok(options)
}

const PAGE: &str = include_str!("../../../examples/serving/README.md");

/// The page's commands have the annotations of the files, each in the section of its engine.
fn commands_have_the_annotations_of_the_files() -> Result<()> {
    let is_command = |block: &&str| block.contains("firn.dev/");
    for engine in &ENGINES {
        let options = options(engine)?;
        let name = engine.file.trim_end_matches(".yaml");
        let sections = PAGE.split("\n## ").skip(1);
        let section = sections
            .filter(|section| {
                section
                    .lines()
                    .next()
                    .is_some_and(|title| title.to_lowercase() == name)
            })
            .collect::<String>();
        let commands: Vec<&str> = section.split("```").filter(is_command).collect();
        ensure!(!commands.is_empty(), "the page has no command for {name}");
        for command in commands {
            let written = command.matches("--annotation").count();
            ensure!(
                written == options.len() / 2,
                "{name}: {written} annotations in{command}"
            );
            for value in options.iter().filter(|option| *option != "--annotation") {
                ensure!(
                    command.contains(&format!("--annotation '{value}'")),
                    "{name}: no {value} in{command}"
                );
            }
        }
    }
    Ok(())
}

fn requests(container: &Container<'_>) -> Result<Vec<String>> {
    let text = container.exec(&["cat", "/requests"])?;
    Ok(text.lines().map(str::to_owned).collect())
}

fn is_asleep(container: &Container<'_>) -> Result<bool> {
    Ok(container.exec(&["ls", "/"])?.contains("asleep"))
}

fn engines_release_memory_before_and_take_it_up_after(platform: Platform) -> Result<()> {
    let node = |name, gpu| GpuHost::for_test(platform, name, &[SimGpu::h200(gpu)]);
    on([node("serve-a", 1)?, node("serve-b", 2)?], |[a, b]| {
        for engine in &ENGINES {
            let options = options(engine)?;
            let options: Vec<&str> = options.iter().map(String::as_str).collect();
            let server = Container::script(a, "job", &["0"], 1, &options, &stand_in(engine))?;
            server.goes_on(3)?;
            let (released, resumed) = (
                format!("POST {} 200 OK", engine.release),
                format!("POST {} 200 OK", engine.resume),
            );
            server.checkpoint("checkpoint/job").with_context(|| engine.file)?;
            server.goes_on(3)?;
            ensure!(
                requests(&server)? == [&*released, &*resumed] && !is_asleep(&server)?,
                "{}: {:?}",
                engine.file,
                requests(&server)?
            );
            a.fault(&["--call", "checkpoint", "--error", "CUDA_ERROR_LAUNCH_FAILED"])?;
            failure(server.checkpoint("checkpoint/never"))?;
            a.no_faults()?;
            ensure!(
                requests(&server)?[2..] == [&*released, &*resumed] && !is_asleep(&server)?,
                "{}: {:?}",
                engine.file,
                requests(&server)?
            );
            // An engine that answers with an error is not checkpointed.
            server.exec(&["touch", "/broken"])?;
            let output = failure(server.checkpoint("checkpoint/never"))?;
            ensure!(
                output.contains("FIRN-HOOK-PREPARE") && output.contains("500"),
                "{output}"
            );
            server.goes_on(3)?;
            a.send_image("checkpoint/job", b)?;
            server.remove()?;
            a.remove_image("checkpoint/job")?;

            let (copy, _) = Container::restore(b, "job", "checkpoint/job", 1)?;
            copy.goes_on(3)?;
            let last = requests(&copy)?.pop();
            ensure!(
                last == Some(resumed) && !is_asleep(&copy)?,
                "{}: {last:?}",
                engine.file
            );
            let facts: Value = serde_json::from_str(&copy.exec(&["cat", "/run/firn/restore.json"])?)?;
            ensure!(facts["hook"] == "restored", "{facts}");
            copy.remove()?;
            b.remove_image("checkpoint/job")?;
        }
        a.idle()?;
        b.idle()
    })
}

pub(crate) fn suite() -> matrix::Suite {
    let cases = cases! {
        engines_release_memory_before_and_take_it_up_after [FORKY];
    };
    let page = matrix::without_node(
        "commands_have_the_annotations_of_the_files",
        commands_have_the_annotations_of_the_files,
    );
    matrix::Suite::new(&cases).with([page])
}
