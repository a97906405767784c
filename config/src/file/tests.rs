use firn_host::Problem;

use super::*;
use crate::load::{ConfigError, Reading};
use crate::mistake::{Keys, MistakeKind};
use crate::section::Section;

const SHIPPED: &str = include_str!("../../config.toml");

/// All sections.
const ALL: Keys = Keys(&[
    "worker",
    "hook",
    "runc",
    "criu",
    "deadlines",
    "create",
    "checkpoint",
    "restore",
    "images",
    "pause",
    "nccl",
    "cuda",
]);

fn reading(text: &str) -> Reading {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), text).unwrap();
    Config::read(file.path()).unwrap()
}

fn parse(text: &str) -> Result<Config, ConfigError> {
    reading(text).of_keys(Path::new("/f"), ALL)
}

#[test]
fn policies_have_the_same_words_in_the_file_and_in_the_annotation() {
    for &(word, policy) in RemapPolicy::WORDS {
        let config = parse(&format!("[restore]\npolicy = \"{word}\"")).unwrap();
        assert_eq!(config.restore.policy, policy);
        assert_eq!((RemapPolicy::of_word(word), policy.word()), (Some(policy), word));
    }
    assert_eq!(parse("").unwrap().restore.policy, RemapPolicy::Auto);
    assert_eq!(RemapPolicy::of_word("Auto"), None);
    assert!(parse("[restore]\npolicy = \"Auto\"").is_err());
}

fn complaint(text: &str) -> String {
    parse(text).unwrap_err().to_string()
}

#[test]
fn a_missing_file_means_the_defaults() {
    let none = Config::read(Path::new("/nonexistent/config.toml")).unwrap();
    assert_eq!(none.config, Config::default());
    assert!(none.mistakes.is_empty());
}

#[test]
fn the_shipped_file_gives_the_defaults() {
    assert_eq!(parse(SHIPPED).unwrap(), Config::default());
}

/// Every key that the shipped file shows as a comment must exist, and uncommenting all of them must
/// parse.
#[test]
fn the_shipped_file_with_every_comment_removed_is_valid() {
    let uncommented: String = SHIPPED
        .lines()
        .map(|l| l.strip_prefix("#").filter(|l| !l.starts_with(' ')).unwrap_or(l))
        .fold(String::new(), |all, line| all + line + "\n");
    let config = parse(&uncommented).unwrap();
    assert!(config.worker.path.is_some() && config.hook.path.is_some() && config.criu.libs_dir.is_some());
    assert!(!config.restore.gpus.is_empty() && !config.restore.gpu_map.is_empty());
    assert_eq!(config.deadlines, Deadlines::default());
}

#[test]
fn an_unknown_key_is_named_with_its_file() {
    let output = complaint("[deadlines]\nlokc = \"3s\"\n");
    assert!(output.contains("invalid configuration /"), "{output}");
    assert!(output.contains("lokc"), "{output}");
    assert!(complaint("[deadline]\n").contains("deadline"));
}

#[test]
fn values_of_the_wrong_shape_are_refused() {
    assert!(complaint("[deadlines]\ngpu-lock = 10\n").contains("gpu-lock"));
    assert!(complaint("[deadlines]\ngpu-lock = \"10\"\n").contains("not a duration"));
    assert!(complaint("[worker]\npath = \"firn-gpu\"\n").contains("not an absolute path"));
}

#[test]
fn all_mistakes_are_found_with_line_and_key_and_the_rest_counts() {
    let read = reading(
        "[deadlines]\nlokc = \"3s\"\ngpu-lock = \"3s\"\n[restore]\ngpus = 7\npolicy = \"strict\"\n\
         [x]\na = 1\n",
    );
    let found: Vec<_> = (read.mistakes.iter())
        .map(|mistake| (mistake.line, &*mistake.key, mistake.kind))
        .collect();
    let expected = [
        (2, "deadlines.lokc", MistakeKind::Key),
        (5, "restore.gpus", MistakeKind::Value),
        (7, "x", MistakeKind::Section),
    ];
    assert_eq!(found, expected);
    assert_eq!(read.config.deadlines.gpu_lock, Duration::from_secs(3));
    assert_eq!(read.config.restore.policy, RemapPolicy::Strict);
    assert!(read.config.restore.gpus.is_empty());
    assert_eq!(read.lines["restore.policy"], 6);
}

/// Each names keys that the file can have, so that no operation goes by a key of another name.
#[test]
fn the_keys_of_every_operation_exist() {
    let mut config = Config::default();
    let sections: Vec<String> = config.keys().into_iter().map(|(name, _)| name).collect();
    let all = [
        Keys::CHECKPOINT,
        Keys::RESTORE,
        Keys::NAMED_RESTORE,
        Keys::CRI,
        Keys::JOB_HOOKS,
        Keys::PAUSE,
        Keys::GPU_REQUEST,
        Keys::RESTORED_GPU_REQUEST,
        Keys::CRIU,
        Keys::CDI,
        Keys::STORE,
        Keys::RUNC,
        ALL,
    ];
    for used in all.iter().flat_map(|keys| keys.0) {
        let wrong = match used.split_once('.') {
            None => format!("{used} = 1\n"),
            Some((section, key)) => format!("[{section}]\n{key} = -1\n"),
        };
        let mistakes = reading(&wrong).mistakes;
        assert_eq!(mistakes[0].kind, MistakeKind::Value, "{used}: {mistakes:?}");
    }
    assert_eq!(sections, ALL.0);
}

#[test]
fn nothing_counts_in_a_file_with_a_syntax_error() {
    let read = reading("[restore]\ncri = true\ngpus = [\"1\"\n[deadlines]\nlokc = \"3s\"\n");
    assert_eq!(read.config, Config::default());
    assert_eq!(read.mistakes[0].kind, MistakeKind::Syntax);
    let twice = reading("[restore]\ncri = true\n[restore]\ncri = false\n");
    assert_eq!(twice.config, Config::default());
    assert_eq!(
        (twice.mistakes[0].line, twice.mistakes[0].kind),
        (3, MistakeKind::Syntax)
    );
}

#[test]
fn values_of_the_file_are_used() {
    let config = parse("[deadlines]\ngpu-lock = \"250ms\"\n[restore]\ngpus = [\"1\"]\n").unwrap();
    assert_eq!(config.deadlines.gpu_lock, Duration::from_millis(250));
    assert_eq!(config.deadlines.gpu_unlock, Deadlines::default().gpu_unlock);
    assert_eq!(config.restore.gpus, ["1"]);
}

#[test]
fn processes_of_execs_are_refused_unless_the_file_has_omit() {
    assert_eq!(parse("[checkpoint]\n").unwrap().checkpoint.exec, Exec::Refuse);
    let omit = parse("[checkpoint]\nexec = \"omit\"\n").unwrap();
    assert_eq!(omit.checkpoint.exec, Exec::Omit);
    assert!(complaint("[checkpoint]\nexec = \"include\"\n").contains("include"));
}

#[test]
fn image_directories_that_others_may_enter_are_closed_by_default() {
    assert_eq!(
        parse("").unwrap().checkpoint.open_image_dir,
        OpenImageDir::Tighten
    );
    let refuse = parse("[checkpoint]\nopen-image-dir = \"refuse\"\n").unwrap();
    assert_eq!(refuse.checkpoint.open_image_dir, OpenImageDir::Refuse);
    assert!(complaint("[checkpoint]\nopen-image-dir = \"open\"\n").contains("open"));
}

#[test]
fn the_host_keeps_its_setting_of_huge_pages_unless_the_file_has_while_copying() {
    assert_eq!(parse("").unwrap().checkpoint.huge_pages, HugePages::Off);
    let on = parse("[checkpoint]\nhuge-pages = \"while-copying\"\n").unwrap();
    assert_eq!(on.checkpoint.huge_pages, HugePages::WhileCopying);
    assert!(complaint("[checkpoint]\nhuge-pages = \"always\"\n").contains("while-copying"));
}

#[test]
fn memory_goes_into_the_image_unless_the_file_names_a_store() {
    assert_eq!(parse("").unwrap().images, Images::default());
    let images = parse("[images]\nstore = \"/s\"\nstore-cap = \"100GiB\"\nbulk = \"store\"\n");
    let images = images.unwrap().images;
    assert_eq!(
        (images.store.as_deref(), images.store_cap),
        (Some(Path::new("/s")), Some(100 << 30))
    );
    assert_eq!((images.bulk, images.allow_bulk), (Bulk::Store, true));
    for &(word, bulk) in Bulk::WORDS {
        assert_eq!(images.bulk_for(Some(word)), Some(bulk));
    }
    assert_eq!(images.bulk_for(Some("Store")), None);
    assert_eq!(images.bulk_for(None), Some(Bulk::Store));
    let forbids = parse("[images]\nallow-bulk = false\n").unwrap().images;
    assert_eq!(forbids.bulk_for(Some("store")), Some(Bulk::Inline));
    assert!(complaint("[images]\nbulk = \"store\"\n").contains("needs the key store"));
    assert!(complaint("[images]\nstore-cap = \"100GB\"\n").contains("100GB"));
    assert!(complaint("[images]\nstore = \"s\"\n").contains("not an absolute path"));
}

#[test]
fn names_of_gpus_give_none_by_default() {
    let create = parse("[create]\n").unwrap().create;
    assert_eq!(create, Create::default());
    assert!(!create.visible_devices && !create.volume_mounts && !create.cdi_annotations);
    assert_eq!(create.hooks, Conversion::Convert);
    let changed = parse(
        "[create]\nhooks = \"keep\"\n\
         visible-devices = true\nvolume-mounts = true\ncdi-annotations = true\ncdi-dirs = []\n",
    );
    let create = changed.unwrap().create;
    assert!(create.visible_devices && create.volume_mounts && create.cdi_annotations);
    assert!(create.cdi_dirs.is_empty());
    assert_eq!(create.hooks, Conversion::Keep);
    assert!(complaint("[create]\nhooks = \"drop\"\n").contains("drop"));
}

#[test]
fn an_unreadable_file_is_not_taken_for_a_missing_one() {
    let dir = tempfile::tempdir().unwrap();
    let error = Config::read(dir.path()).unwrap_err();
    assert_eq!(error.code(), "FIRN-CONFIG-UNREADABLE");
}

#[test]
fn the_shipped_containerd_files_are_toml_and_name_the_shim() {
    for text in [
        include_str!("../../containerd/config-v2.toml"),
        include_str!("../../containerd/config-v3.toml"),
    ] {
        let table: toml::Table = text.parse().unwrap();
        let plugin = table["plugins"].as_table().unwrap().values().next().unwrap();
        let runtime = &plugin["containerd"]["runtimes"]["firn"];
        assert!(
            runtime["runtime_path"]
                .as_str()
                .unwrap()
                .ends_with("/containerd-shim-firn-v2")
        );
        let passed: Vec<_> = runtime["pod_annotations"].as_array().unwrap().iter().collect();
        let known = [
            names::ANNOTATION_GPU_MAP,
            names::ANNOTATION_REMAP_POLICY,
            names::ANNOTATION_IPC,
            names::ANNOTATION_GPU,
            names::ANNOTATION_NCCL,
            names::ANNOTATION_CUDA,
            names::ANNOTATION_PEER_ACCESS,
            names::ANNOTATION_CPU,
            names::ANNOTATION_EXEC,
            names::ANNOTATION_PAUSE,
            names::ANNOTATION_RESTORE_FROM,
            names::ANNOTATION_RESTORE_FALLBACK,
            names::ANNOTATION_RESTORE_RESTARTS,
        ];
        assert_eq!(
            runtime["container_annotations"][0].as_str(),
            Some(names::ANNOTATION_RESTARTS)
        );
        assert_eq!(
            passed.iter().filter_map(|name| name.as_str()).collect::<Vec<_>>(),
            known
        );
    }
}
