//! Compares what `firn --json` prints with docs/reference/schema.json.
//!
//! It knows the keywords of JSON Schema that the file has, and fails on any other. It is stricter than the
//! schema is for consumers: a field that is not described fails.

use std::fs;
use std::path::PathBuf;

use serde_json::{Map, Value};

/// Where the schema is.
pub fn path() -> PathBuf {
    crate::root().join("docs/reference/schema.json")
}

/// The value that a command of firn has printed, if its schema describes it. `words` is the command line
/// without the program. Where the tests run without their repository, there is no schema.
///
/// # Errors
/// It is no JSON, or the schema does not describe it.
pub fn printed(words: &[&str], output: &str) -> Result<Value, String> {
    let value: Value = serde_json::from_str(output).map_err(|error| format!("{error}: {output}"))?;
    let is_failure = value.as_object().is_some_and(|fields| {
        let others = ["failure", "containers"];
        fields.keys().all(|key| others.contains(&&**key)) && value["failure"]["message"].is_string()
    });
    if !crate::root().exists() {
        return Ok(value);
    }
    let mut schema = read()?;
    let name = if is_failure {
        "failure".to_owned()
    } else {
        name(&schema, words)
    };
    schema["$ref"] = Value::from(format!("#/$defs/{name}"));
    match faults(&schema, &value) {
        faults if faults.is_empty() => Ok(value),
        faults => Err(format!(
            "not as the schema describes {name}: {}: {value:#}",
            faults.join("; ")
        )),
    }
}

/// The definition of a command: one of two words, as `images ls`, or of one.
fn name(schema: &Value, words: &[&str]) -> String {
    let words: Vec<&str> = words
        .iter()
        .take_while(|word| !word.starts_with('-'))
        .copied()
        .collect();
    let of = |count: usize| format!("firn {}", words[..count.min(words.len())].join(" "));
    if schema["$defs"].get(of(2)).is_some() {
        of(2)
    } else {
        of(1)
    }
}

fn read() -> Result<Value, String> {
    let path = path();
    let text = fs::read_to_string(&path).map_err(|error| format!("read {}: {error}", path.display()))?;
    serde_json::from_str(&text).map_err(|error| format!("{}: {error}", path.display()))
}

/// What of a value a schema does not describe.
pub fn faults(schema: &Value, value: &Value) -> Vec<String> {
    let mut check = Check {
        root: schema,
        found: Vec::new(),
    };
    check.whole(schema, value, "");
    check.found
}

/// A value is compared with a schema, and this is what does not fit.
struct Check<'a> {
    root: &'a Value,
    found: Vec<String>,
}

impl<'a> Check<'a> {
    /// The value, all of whose fields have to be described.
    fn whole(&mut self, schema: &'a Value, value: &Value, at: &str) {
        self.value(schema, value, at);
        let described = self.described(schema);
        let fields = value.as_object().into_iter().flat_map(Map::keys);
        for name in fields.filter(|name| described.as_ref().is_some_and(|all| !all.contains(name))) {
            self.found.push(format!("{at}/{name}: is not described"));
        }
    }

    fn value(&mut self, schema: &'a Value, value: &Value, at: &str) {
        let Some(keywords) = schema.as_object() else {
            if *schema != Value::Bool(true) {
                self.found.push(format!("{at}: nothing may be here"));
            }
            return;
        };
        for (keyword, of) in keywords {
            let fault = match keyword.as_str() {
                "type" => (!is_type(of, value)).then(|| format!("is no {of}")),
                "const" => (of != value).then(|| format!("is not {of}")),
                "enum" => (!list(of).contains(value)).then(|| format!("is none of {of}")),
                "minimum" => (value.as_f64() < of.as_f64()).then(|| format!("is less than {of}")),
                "format" => wrong_format(of, value),
                "minItems" => (list(value).len() < length(of)).then(|| format!("is shorter than {of}")),
                "maxItems" => (list(value).len() > length(of)).then(|| format!("is longer than {of}")),
                "required" => missing(of, value),
                "anyOf" | "oneOf" => self.one_of(of, value, at),
                "$schema" | "$defs" | "title" | "description" => None,
                "$ref" | "items" | "properties" | "additionalProperties" => {
                    self.parts(keyword, of, value, at);
                    None
                }
                unknown => Some(format!("the schema has {unknown}, which is not compared")),
            };
            self.found.extend(fault.map(|fault| format!("{at}: {fault}")));
        }
    }

    /// A keyword that has schemas of parts of the value, or of all of it.
    fn parts(&mut self, keyword: &str, of: &'a Value, value: &Value, at: &str) {
        match keyword {
            "$ref" => match self.named(of) {
                Some(schema) => self.value(schema, value, at),
                None => self.found.push(format!("{at}: the schema has no {of}")),
            },
            "items" => {
                for (nth, item) in list(value).iter().enumerate() {
                    self.whole(of, item, &format!("{at}/{nth}"));
                }
            }
            "properties" => {
                for (name, schema) in of.as_object().into_iter().flatten() {
                    if let Some(field) = value.get(name) {
                        self.whole(schema, field, &format!("{at}/{name}"));
                    }
                }
            }
            // No schema has these next to properties.
            _ => {
                for (name, field) in value.as_object().into_iter().flatten() {
                    self.whole(of, field, &format!("{at}/{name}"));
                }
            }
        }
    }

    fn named(&self, reference: &Value) -> Option<&'a Value> {
        self.root.pointer(reference.as_str()?.strip_prefix('#')?)
    }

    /// The fields that a schema describes; none if it describes no object, or all of an object's fields.
    fn described(&self, schema: &'a Value) -> Option<Vec<&'a String>> {
        let referenced = schema.get("$ref").and_then(|name| self.named(name));
        let referenced = referenced.and_then(|schema| self.described(schema));
        let is_closed = schema["type"] == "object" && schema.get("additionalProperties").is_none();
        if referenced.is_none() && !is_closed {
            return None;
        }
        let own = schema.get("properties").and_then(Value::as_object);
        let own = own.into_iter().flat_map(Map::keys);
        Some(own.chain(referenced.into_iter().flatten()).collect())
    }

    /// At least one describes it: what the nearest one does not describe.
    fn one_of(&self, of: &'a Value, value: &Value, at: &str) -> Option<String> {
        let faults = list(of).iter().map(|schema| {
            let (root, found) = (self.root, Vec::new());
            let mut check = Check { root, found };
            check.whole(schema, value, at);
            check.found
        });
        let least = faults.min_by_key(Vec::len).unwrap_or_default();
        (!least.is_empty()).then(|| least.join("; "))
    }
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn length(of: &Value) -> usize {
    of.as_u64()
        .map_or(0, |length| usize::try_from(length).unwrap_or(usize::MAX))
}

fn is_type(of: &Value, value: &Value) -> bool {
    let is = |name: &Value| match name.as_str() {
        Some("object") => value.is_object(),
        Some("array") => value.is_array(),
        Some("string") => value.is_string(),
        Some("boolean") => value.is_boolean(),
        Some("integer") => value.is_i64() || value.is_u64(),
        Some("number") => value.is_number(),
        _ => false,
    };
    is(of) || list(of).iter().any(is)
}

fn missing(of: &Value, value: &Value) -> Option<String> {
    let fields = value.as_object()?;
    let names = list(of).iter().filter_map(Value::as_str);
    let missing: Vec<&str> = names.filter(|name| !fields.contains_key(*name)).collect();
    (!missing.is_empty()).then(|| format!("lacks {}", missing.join(", ")))
}

/// Formats of numbers are those of Rust's types, which the type and the minimum describe.
fn wrong_format(of: &Value, value: &Value) -> Option<String> {
    match (of.as_str()?, value.as_str()) {
        ("date-time", Some(text)) => (!is_utc(text)).then(|| format!("is no time in UTC: {text}")),
        ("uint" | "uint8" | "uint32" | "uint64" | "int32" | "double", _) => None,
        (other, _) => Some(format!(
            "the schema has the format {other}, which is not compared"
        )),
    }
}

/// Whether it is a time as RFC 3339 has it, in UTC.
fn is_utc(text: &str) -> bool {
    const SHAPE: &str = "0000-00-00T00:00:00";
    let fits = |(c, shape): (char, char)| {
        if shape == '0' {
            c.is_ascii_digit()
        } else {
            c == shape
        }
    };
    let (Some(head), Some(rest)) = (text.get(..SHAPE.len()), text.get(SHAPE.len()..)) else {
        return false;
    };
    let fraction = rest
        .strip_suffix('Z')
        .map(|rest| rest.strip_prefix('.').unwrap_or(rest));
    head.chars().zip(SHAPE.chars()).all(fits)
        && fraction.is_some_and(|fraction| fraction.chars().all(|c| c.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// What a schema with these keywords finds wrong with a value.
    fn found(schema: Value, value: Value) -> String {
        faults(&schema, &value).join("; ")
    }

    /// Each schema describes the first value, and not the second.
    fn divides(cases: impl IntoIterator<Item = (Value, Value, Value)>) {
        for (schema, good, bad) in cases {
            assert_eq!(found(schema.clone(), good.clone()), "", "{schema} {good}");
            assert_ne!(found(schema.clone(), bad.clone()), "", "{schema} {bad}");
        }
    }

    #[test]
    fn every_keyword_of_a_value_refuses_what_it_shall() {
        let time = json!({"type": "string", "format": "date-time"});
        divides([
            (json!({"type": "string"}), json!("a"), json!(1)),
            (json!({"type": ["string", "integer"]}), json!(1), json!(null)),
            (json!({"type": "integer", "minimum": 0}), json!(0), json!(-1)),
            (json!({"type": "integer"}), json!(2), json!(2.5)),
            (
                json!({"type": "number", "format": "double"}),
                json!(2.5),
                json!("2.5"),
            ),
            (json!({"type": "boolean"}), json!(true), json!("true")),
            (json!({"const": "a"}), json!("a"), json!("b")),
            (json!({"enum": ["a", "b"]}), json!("b"), json!("c")),
            (json!({"anyOf": [{"const": 1}, {"const": 2}]}), json!(2), json!(3)),
            (json!({"oneOf": [{"const": 1}, {"const": 2}]}), json!(2), json!(3)),
            (
                json!({"$ref": "#/$defs/a", "$defs": {"a": {"const": 1}}}),
                json!(1),
                json!(2),
            ),
            (time.clone(), json!("2026-01-31T23:59:59Z"), json!("2026-01-31")),
            (
                time,
                json!("2026-01-31T23:59:59.123Z"),
                json!("2026-01-31T23:59:59+01:00"),
            ),
        ]);
    }

    #[test]
    fn every_keyword_of_lists_and_objects_refuses_what_it_shall() {
        let two = json!({"items": true, "minItems": 2, "maxItems": 2});
        let object = |more: Value| {
            let mut schema = json!({"type": "object", "properties": {"a": {"type": "string"}}});
            let (schema_fields, more) = (schema.as_object_mut().unwrap(), more.as_object().unwrap().clone());
            schema_fields.extend(more);
            schema
        };
        let other = json!({"$ref": "#/$defs/b", "$defs": {"b": object(json!({"properties": {"b": true}}))}});
        divides([
            (
                json!({"type": "array", "items": {"type": "string"}}),
                json!(["a"]),
                json!(["a", 1]),
            ),
            (two.clone(), json!([1, 2]), json!([1])),
            (two, json!([1, 2]), json!([1, 2, 3])),
            (object(json!({"required": ["a"]})), json!({"a": "b"}), json!({})),
            (object(json!({})), json!({"a": "b"}), json!({"a": "b", "c": 1})),
            (object(json!({})), json!({"a": "b"}), json!({"a": null})),
            (
                json!({"type": "object", "additionalProperties": {"type": "string"}}),
                json!({"a": "b"}),
                json!({"a": 1}),
            ),
            (
                object(other),
                json!({"a": "b", "b": 2}),
                json!({"a": "b", "c": 2}),
            ),
        ]);
    }

    #[test]
    fn what_is_not_compared_fails() {
        for schema in [
            json!({"pattern": "a"}),
            json!({"format": "uuid"}),
            json!({"$ref": "#/$defs/none"}),
            json!(false),
        ] {
            assert_ne!(found(schema.clone(), json!("a")), "", "{schema}");
        }
        let nested = json!({"properties": {"a": {"items": {"type": "string"}}}});
        assert_eq!(found(nested, json!({"a": [1]})), "/a/0: is no \"string\"");
    }

    #[test]
    fn an_output_is_compared_with_the_schema_of_its_command() {
        let empty = r#"{"checkpoints": []}"#;
        assert!(printed(&["images", "ls", "--json"], empty).is_ok());
        assert!(printed(&["images", "du"], empty).unwrap_err().contains("lacks"));
        assert!(printed(&["ps", "job"], empty).is_err());
        let failed = r#"{"failure": {"code": "FIRN-PLACE", "message": "x"}}"#;
        assert!(printed(&["restore", "x.tar"], failed).is_ok());
        assert!(printed(&["restore", "x.tar"], r#"{"failure": "FIRN-PLACE: x"}"#).is_err());
        assert!(printed(&["restore", "x.tar"], "").is_err());
    }
}
