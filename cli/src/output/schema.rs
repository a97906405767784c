//! The schema of what `--json` prints, by the types: docs/reference/schema.json has it.

use schemars::generate::{SchemaGenerator, SchemaSettings};
use schemars::transform::RecursiveTransform as EachPart;
use schemars::{JsonSchema, Schema};
use serde_json::{Map, Value, json};

/// Set: the file is written.
const WRITE: &str = "FIRN_WRITE_SCHEMA";

/// A command, or `failure`, and the type that it prints; [`printed`](crate::output::printed) makes one.
pub struct Command {
    pub name: &'static str,
    pub schema: fn(&mut SchemaGenerator) -> Schema,
}

inventory::collect!(Command);

/// The schema of a type: a reference to its definition.
pub fn of<T: JsonSchema>(generator: &mut SchemaGenerator) -> Schema {
    generator.subschema_for::<T>()
}

/// Names of the commands that print JSON, with `failure`.
pub fn names() -> impl Iterator<Item = &'static str> {
    inventory::iter::<Command>.into_iter().map(|command| command.name)
}

/// One definition for each type, and for each command.
fn whole() -> Value {
    let settings = SchemaSettings::draft2020_12().with_transform(EachPart(without_null));
    let mut generator = settings.with_transform(EachPart(in_one_line)).into_generator();
    let mut commands: Vec<&Command> = inventory::iter::<Command>.into_iter().collect();
    // Types of one name get numbers in this order.
    commands.sort_by_key(|command| command.name);
    let of_command = |command: &Command| {
        let name = match command.name {
            "failure" => "failure".to_owned(),
            name => format!("firn {name}"),
        };
        (name, (command.schema)(&mut generator).to_value())
    };
    let mut definitions: Map<String, Value> = commands.into_iter().map(of_command).collect();
    definitions.extend(generator.take_definitions(true));
    json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "What firn prints with --json",
        "description": "The definition of a command, as `firn ps`, is that of the object that it prints.",
        "$defs": definitions,
    })
}

#[test]
fn the_schema_is_that_of_the_types() {
    let schema = whole();
    assert_eq!(undescribed(&schema), Vec::<String>::new());
    let text = serde_json::to_string_pretty(&schema).expect("JSON") + "\n";
    let path = firn_documents::schema::path();
    if std::env::var_os(WRITE).is_some() {
        std::fs::write(&path, &text).unwrap_or_else(|error| panic!("write {}: {error}", path.display()));
    }
    let kept = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        kept == text,
        "{} is not that of the types: run the test with {WRITE}=1",
        path.display()
    );
}

/// What has no value is absent.
fn without_null(schema: &mut Schema) {
    if let Some(Value::Array(types)) = schema.get_mut("type") {
        types.retain(|name| name != "null");
        if let [only] = &types[..] {
            let only = only.clone();
            schema.insert("type".to_owned(), only);
        }
    }
    let Some(Value::Array(any)) = schema.get_mut("anyOf") else {
        return;
    };
    any.retain(|one| one["type"] != "null");
    if let [Value::Object(only)] = &any[..] {
        let only = only.clone();
        schema.remove("anyOf");
        for (key, value) in only {
            schema.insert(key, value);
        }
    }
}

/// A description has no line ends of the source.
fn in_one_line(schema: &mut Schema) {
    if let Some(Value::String(text)) = schema.get_mut("description") {
        let paragraphs = text.split("\n\n").map(|paragraph| paragraph.replace('\n', " "));
        *text = paragraphs.collect::<Vec<_>>().join("\n\n");
    }
}

/// Fields without a description, in whatever depth.
fn undescribed(schema: &Value) -> Vec<String> {
    let mut found = Vec::new();
    match schema {
        Value::Object(keys) => {
            let fields = keys.get("properties").and_then(Value::as_object);
            // The field that names a value of an enum.
            let is_value = fields.is_some_and(|fields| fields.len() == 1) && keys.contains_key("description");
            for (name, field) in fields.into_iter().flatten().filter(|_| !is_value) {
                if field.get("description").or(field.get("const")).is_none() {
                    found.push(name.clone());
                }
            }
            found.extend(keys.values().flat_map(undescribed));
        }
        Value::Array(all) => found.extend(all.iter().flat_map(undescribed)),
        _ => {}
    }
    found
}
