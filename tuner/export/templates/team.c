/* Made by relax-tune @VERSION@: the threads of @NAME@. */
#define TEAM(name) @NAME@_team_##name
#define TEAM_LINKAGE __attribute__((visibility("hidden")))
@TEAM_SOURCE@