//! Schemas of what `--json` prints, by the types: docs/reference/schemas has them.

use std::fs;

use firn_documents::schema;
use schemars::generate::SchemaSettings;
use schemars::transform::RecursiveTransform as EachPart;
use schemars::{JsonSchema, Schema};
use serde_json::{Value, json};

/// Set: the files are written.
const WRITE: &str = "FIRN_WRITE_SCHEMAS";

/// Compares the schema of a type with the file of a command, or writes the file.
pub fn compare<T: JsonSchema>(command: &str) {
    let settings = SchemaSettings::draft2020_12().with_transform(EachPart(without_null));
    let settings = settings.with_transform(EachPart(in_one_line));
    let mut schema = settings.into_generator().into_root_schema_for::<T>();
    let title = match command {
        "failure" => "a command of firn with --json that has failed".to_owned(),
        _ => format!("firn {command} --json"),
    };
    schema.insert("title".to_owned(), json!(title));
    let name = command.replace(' ', "-");
    assert_eq!(undescribed(schema.as_value()), Vec::<String>::new(), "{name}");
    let path = schema::directory().join(name).with_extension("json");
    let text = serde_json::to_string_pretty(&schema).expect("JSON") + "\n";
    if std::env::var_os(WRITE).is_some() {
        fs::write(&path, text).unwrap_or_else(|error| panic!("write {}: {error}", path.display()));
        return;
    }
    let kept = fs::read_to_string(&path).unwrap_or_default();
    let shown = path.display();
    assert_eq!(
        kept, text,
        "{shown} is not that of the type: run the test with {WRITE}=1"
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
