//! Runs `firn` as a person does, on directories of the test's own and with stand-ins for the programs that it calls.

mod audit;
mod cdi;
mod doctor;
mod inspect;
mod node;
mod plan;

use node::{Node, text};

#[test]
fn wrong_usage_and_help() {
    let node = Node::new();
    assert_eq!(node.firn(&["plan", "image"]).status.code(), Some(2));
    assert_eq!(node.firn(&["thaw"]).status.code(), Some(2));
    for command in ["inspect", "plan", "doctor"] {
        let output = node.firn(&[command, "--help"]);
        assert!(
            output.status.success() && text(&output).contains("Exit status: "),
            "{command}"
        );
    }
}
